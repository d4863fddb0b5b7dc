"""Turns conversations into prompts by chat templates, and answers into tool calls. No engine, network or event loop."""
