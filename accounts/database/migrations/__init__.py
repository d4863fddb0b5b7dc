"""The history of the accounts database's tables, by alembic."""
