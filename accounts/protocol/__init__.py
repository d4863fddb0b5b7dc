"""The structures that gateways and the accounts service exchange, in Redis and over HTTP."""
