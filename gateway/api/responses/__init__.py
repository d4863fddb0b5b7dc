"""OpenAI's Responses dialect: typed items in and out, stored unless the caller says otherwise."""
