"""A folder of GGUF files that is served as it is: which of them are models, and what belongs to each."""
