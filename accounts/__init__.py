"""The accounts service: the one part of Paddock with a database. It keeps teams, keys, budgets, usage and the audit."""
