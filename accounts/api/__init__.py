"""The HTTP API of the accounts service. Gateways forward requests to it, with the caller that they identified."""
