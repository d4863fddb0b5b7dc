"""The prefix cache: which sequence holds which KV cells, which prefixes stay, and the blocks saved in RAM."""
