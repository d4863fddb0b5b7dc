"""OpenID Connect as gateways and the accounts service both use it: a provider's documents and keys, tokens, claims."""
