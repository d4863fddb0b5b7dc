"""Limits and budgets: what each call counts for, over all gateways, and what it costs."""
