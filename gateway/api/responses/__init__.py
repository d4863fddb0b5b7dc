"""OpenAI's Responses dialect: typed items in and out; responses are stored unless the caller says otherwise."""
