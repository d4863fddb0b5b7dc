"""Runs migrations for alembic on the connection that `accounts.database.upgrade` hands over."""

from __future__ import annotations

from alembic import context

from accounts.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_type=True,
    compare_server_default=False,
    render_as_batch=False,
    transactional_ddl=False,  # the caller's transaction holds all steps
)
context.run_migrations()
