"""Tokens of answers that have no end yet: what is counted of them where they are cut off."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Reasoning, Started, Text, ToolCallDelta, Usage

OUTPUT = (Text, Reasoning, ToolCallDelta)


class Unended:
    """Of all answers of one request together. `hear` comes once per token."""

    __slots__ = ("_cached", "_generated", "_prompt")

    def __init__(self) -> None:
        self._prompt = self._cached = self._generated = 0

    def hear(self, events: Iterable[CallEvent]) -> None:
        for event in events:
            if isinstance(event, OUTPUT):
                self._generated += event.num_tokens
            elif type(event) is Started:
                self._prompt += event.num_prompt_tokens
                self._cached += event.num_cached_tokens

    def ended(self, usage: Usage) -> None:
        """One of them has, and tells its own tokens; those that became no text are among them."""
        self._prompt -= usage.prompt_tokens
        self._cached -= usage.cached_tokens
        self._generated -= usage.completion_tokens

    def note(self, trail: Trail) -> None:
        """What is left, once: they will have no end."""
        left = Usage(max(0, self._prompt), max(0, self._generated), max(0, self._cached))
        if left.prompt_tokens or left.completion_tokens:
            trail.used(left)
