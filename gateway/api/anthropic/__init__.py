"""Anthropic's dialect: messages, counts of their tokens, and lists of models."""
