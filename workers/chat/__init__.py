"""Conversations as text: the model's chat template in, tool calls out. No engine, no network, no event loop."""
