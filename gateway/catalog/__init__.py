"""Which names a caller may use, and the model that each of them leads to."""
