"""The database: its tables, how they are reached, and the migrations that bring it up to date."""
