"""The operations on organisations, teams, users, keys and aliases: in the database, audited, and published to Redis."""
