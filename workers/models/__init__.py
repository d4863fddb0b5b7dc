"""Models before they are loaded: catalog entries, files and how these are fetched, the plan of their memory."""
