"""The routes that scripts for LiteLLM call: keys, teams and users with its field names, on the same operations."""
