"""`paddock import`: turns configuration files of llama-swap and LiteLLM into a catalog."""
