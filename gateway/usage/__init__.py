"""The usage of calls: recorded once per call, kept on disk until the ledger has it, and sent there through Redis."""
