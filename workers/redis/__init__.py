"""Connects to Redis: reads its URL, makes clients of a server, of Sentinels or of a Cluster, explains their errors."""
