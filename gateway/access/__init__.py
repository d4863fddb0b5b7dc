"""Who is calling: API keys, what each may use, and the first key."""
