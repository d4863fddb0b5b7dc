"""Authentication and authorisation: API keys, what each key may use, and how the first key is made."""
