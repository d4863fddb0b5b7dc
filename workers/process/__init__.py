"""A process as its machine sees it: limits, memory, signals, threads, helper processes, sockets, log lines."""
