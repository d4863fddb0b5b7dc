"""The engine for pooled work: embeddings and scores."""
