"""The ledger: writes the usage records that gateways send into the database, each once, with their sums."""
