"""Admits calls: leases slots to them, queues those that must wait, keeps leases and queue tickets alive in Redis."""
