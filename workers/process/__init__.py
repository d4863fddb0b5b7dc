"""Sets up a process and its helpers: limits, memory, signals, threads, helper processes, sockets, log lines."""
