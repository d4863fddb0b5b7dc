"""Authentication and authorisation: API keys, what each may use, and the first key."""
