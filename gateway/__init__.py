"""The gateway of Paddock: one OpenAI-compatible address for a fleet of llama.cpp workers."""

__version__ = "0.1.0"
