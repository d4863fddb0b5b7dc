"""The commands over the admin API: keys, teams, limits, budgets, usage, audit, prices, and signing in."""
