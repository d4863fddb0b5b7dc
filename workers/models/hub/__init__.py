"""Downloads of models, projectors and adapters from the Hugging Face hub."""
