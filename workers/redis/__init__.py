"""The way to Redis: its URL, clients of a server, of Sentinels and of a Cluster, and what their errors mean."""
