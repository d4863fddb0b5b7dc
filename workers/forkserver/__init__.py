"""Starts workers as forks of one process that has imported everything: see docs/architecture.md, "How a worker starts".

`client` asks for workers, in the supervisor; `__main__` is the process that forks; `newborn` turns a forked process
into a worker; `helpers` are the worker's helper processes, which it forks before it has any secret.
"""
