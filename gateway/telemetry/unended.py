"""Tokens of answers that have no end yet: what is counted of them where they are cut off."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Reasoning, Started, Text, ToolCallDelta, Usage

OUTPUT = (Text, Reasoning, ToolCallDelta)


class Unended:
    """Of the answers of one request. `hear` comes once per token."""

    __slots__ = ("_generated", "_started")

    def __init__(self) -> None:
        self._started: dict[int, Started] = {}
        self._generated: dict[int, int] = {}
        """Both by the number of the answer, without those that have ended: these tell their own tokens."""

    def hear(self, choice: int, events: Iterable[CallEvent]) -> None:
        for event in events:
            if isinstance(event, OUTPUT):
                self._generated[choice] = self._generated.get(choice, 0) + event.num_tokens
            elif type(event) is Started:
                self._started[choice] = event

    def ended(self, choice: int) -> None:
        self._generated.pop(choice, None)
        self._started.pop(choice, None)

    def note(self, trail: Trail) -> None:
        """What is left will have no end."""
        started = self._started.values()
        left = Usage(
            sum(event.num_prompt_tokens for event in started),
            sum(self._generated.values()),
            sum(event.num_cached_tokens for event in started),
        )
        if left.prompt_tokens or left.completion_tokens:
            trail.used(left)
