"""OpenAI's Responses dialect: typed items in and out, kept for later where the caller does not say otherwise."""
