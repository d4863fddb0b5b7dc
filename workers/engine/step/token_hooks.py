"""Handles the drawn tokens of calls that ask for more than text: emits their tokens and timings, ends them when their
time runs out or a line is not indented enough.

All other calls never come here.
"""

from __future__ import annotations

import time
from typing import Protocol

from workers.engine.request import EngineRequest
from workers.protocol.events import CallEvent, FinishReason, Text, Timings, TimingsSoFar, Tokens

BLANKS = " \t"


class Indent:
    """Finds the end of an answer that can have indented lines only, such as the body of a function.

    The answer ends before a line, except its first, that begins with fewer than `least` blanks or tabs, even if that
    line is empty. Source: `n_indent` in tools/server/README.md and server-context.cpp of llama.cpp."""

    __slots__ = ("_least", "_seen")

    def __init__(self, least: int) -> None:
        self._least = least
        self._seen: int | None = None
        """Blanks read at the start of the current line; None: other text followed them, or it is the first line."""

    def end_in(self, text: str) -> int | None:
        """Return the position in `text` (the next piece of the answer) at which the answer ends; None: it goes on."""
        for place, character in enumerate(text):
            if self._seen is not None and character in BLANKS:
                self._seen += 1
            elif self._seen is not None and self._seen < self._least:
                return place
            else:
                self._seen = 0 if character == "\n" else None
        return None


class Answer(Protocol):
    """The part of a `Sequence` that `TokenHooks` needs."""

    first_token_at: float

    def accept(self, token: int, events: list[CallEvent]) -> FinishReason | None: ...

    def timings(self, now: float) -> Timings: ...

    def flush(self, events: list[CallEvent]) -> None:
        """Add the text that was held back to `events`, since no more tokens are wanted."""


class TokenHooks:
    """Handles the drawn tokens of one call. For the engine's thread only."""

    __slots__ = ("_indent", "_key", "_max_predict_s", "_tells_timings", "_tells_tokens")

    def __init__(self, request: EngineRequest) -> None:
        self._key = request.key
        self._tells_tokens = "tokens" in request.asked.tell
        self._tells_timings = "timings" in request.asked.tell
        self._max_predict_s = request.asked.max_predict_ms / 1e3
        self._indent = Indent(request.asked.n_indent) if request.asked.n_indent else None

    def accept(self, answer: Answer, token: int, events: list[CallEvent]) -> FinishReason | None:
        """Take a drawn token like `Sequence.accept`. Before its text, emit `Tokens` and `TimingsSoFar` if asked for."""
        if self._tells_tokens:
            events.append(Tokens(self._key, (token,)))
        place = len(events)
        reason = answer.accept(token, events)
        if len(events) == place:
            return reason
        if self._indent is not None and self._is_cut(self._indent, events, place):
            return FinishReason.LENGTH
        now = time.perf_counter()
        if reason is None and self._is_late(answer, events[place], now):
            answer.flush(events)
            reason = FinishReason.LENGTH
        if self._tells_timings:
            events.insert(place, TimingsSoFar(self._key, answer.timings(now)))
        return reason

    def _is_cut(self, indent: Indent, events: list[CallEvent], place: int) -> bool:
        """Return whether a line of the new text ends the answer; if so, cut off the text from there on."""
        event = events[place]
        end = indent.end_in(event.text) if isinstance(event, Text) else None
        if end is None or not isinstance(event, Text):
            return False
        events[place:] = [Text(event.call, event.text[:end], event.num_tokens)] if end else []
        return True

    def _is_late(self, answer: Answer, event: CallEvent, now: float) -> bool:
        """Return whether `max_predict_ms` from the first token have passed. As in llama-server, it is checked at line
        ends only."""
        if not self._max_predict_s or not answer.first_token_at or not isinstance(event, Text):
            return False
        return "\n" in event.text and now - answer.first_token_at > self._max_predict_s
