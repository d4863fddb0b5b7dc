"""Prices, and budgets: what they have spent, warnings by webhook, and their counters in Redis."""
