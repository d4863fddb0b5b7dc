"""Who may start now and who waits: leases on slots, tickets in line, and keeping both alive."""
