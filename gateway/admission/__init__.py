"""Admission of calls: leases on slots, the queue of tickets, and keeping both alive in Redis."""
