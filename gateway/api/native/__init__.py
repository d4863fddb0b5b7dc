"""llama-server's own dialect: raw completions, texts and tokens, slots, adapters, properties."""
