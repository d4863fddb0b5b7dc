"""The catalog of a gateway: which models its callers' names stand for, as the file says now."""
