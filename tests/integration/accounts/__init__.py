"""The accounts service with real databases and a real Redis."""
