"""The names that a caller may use, and the model behind each of them."""
