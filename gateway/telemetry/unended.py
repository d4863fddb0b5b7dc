"""Counts the tokens of answers that have not ended yet, for those that are cut off (partial usage)."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Reasoning, Started, Text, ToolCallDelta, Usage

OUTPUT = (Text, Reasoning, ToolCallDelta)


class Unended:
    """The partial usage of one request's answers. `hear` is called once per token."""

    __slots__ = ("_generated", "_started")

    def __init__(self) -> None:
        self._started: dict[int, Started] = {}
        self._generated: dict[int, int] = {}
        """Number of the answer -> its first event, its tokens; ended answers, which report their own, are left out."""

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
        """Add the usage of the answers that have not ended to the trail: they were cut off."""
        started = self._started.values()
        left = Usage(
            sum(event.num_prompt_tokens for event in started),
            sum(self._generated.values()),
            sum(event.num_cached_tokens for event in started),
        )
        if left.prompt_tokens or left.completion_tokens:
            trail.used(left)
