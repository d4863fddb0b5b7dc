"""Counts the tokens of the answers of one stream."""

from __future__ import annotations

from typing import Any

from gateway.api.openai.stream_options import UsageWish
from gateway.api.tallies import usage_object
from gateway.choices import usage_of
from workers.protocol.events import Finished, Started, Usage


class StreamUsage:
    """The usage that a stream tells: exact at the end, counted so far before."""

    def __init__(self, wish: UsageWish, num_answers: int, num_prompts: int) -> None:
        self.always = wish.always
        self.at_end = wish.at_end
        self._per_prompt = num_answers // num_prompts
        self._starts: dict[int, Started] = {}
        """The start of the first answer to each prompt: a prompt counts once."""
        self._generated = [0] * num_answers
        self._thought = [0] * num_answers
        self.ends: list[Finished | None] = [None] * num_answers

    def started(self, number: int, event: Started) -> None:
        self._starts.setdefault(number // self._per_prompt, event)

    def generated(self, number: int, num_tokens: int) -> None:
        self._generated[number] += num_tokens

    def thought(self, number: int, num_tokens: int) -> None:
        self._thought[number] += num_tokens

    def ended(self, number: int, event: Finished) -> None:
        self.ends[number] = event
        self._generated[number] = event.usage.completion_tokens

    def so_far(self) -> dict[str, Any]:
        starts = self._starts.values()
        usage = Usage(
            sum(start.num_prompt_tokens for start in starts),
            sum(self._generated),
            sum(start.num_cached_tokens for start in starts),
        )
        return usage_object(usage, sum(self._thought))

    def whole(self) -> dict[str, Any]:
        """Return the usage when every answer has ended."""
        ends = [end for end in self.ends if end is not None]
        return usage_object(usage_of(ends, len(ends) // self._per_prompt), sum(self._thought))
