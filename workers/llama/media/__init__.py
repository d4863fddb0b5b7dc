"""Makes embeddings of pictures and sound with a projector (docs/media.md)."""
