"""Checks what callers write, and translates it for llguidance: JSON Schema, regular expressions, grammars of tools."""
