"""Decodes pictures and sounds that callers send, in helper processes with limits (docs/media.md)."""
