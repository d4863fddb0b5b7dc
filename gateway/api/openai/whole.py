"""Collects and writes whole answers of several kinds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gateway.api.answers import in_parts
from gateway.api.tallies import timings_object
from workers.protocol.events import CallEvent, Finished


class Choice(Protocol):
    """Collects one of the answers."""

    @property
    def end(self) -> Finished | None: ...
    def add(self, event: CallEvent) -> None: ...
    def object(self, number: int, end: Finished) -> dict[str, Any]: ...
    def verbose(self, end: Finished) -> dict[str, Any]: ...


ChoiceT = TypeVar("ChoiceT", bound=Choice)


class Whole(Generic[ChoiceT]):
    """Collects all answers to one request from the events."""

    def __init__(self, choices: Sequence[ChoiceT]) -> None:
        self.choices = choices

    def add(self, events: list[CallEvent], choice: int) -> None:
        collected = self.choices[choice]
        for event in events:
            collected.add(event)

    @property
    def ends(self) -> list[Finished]:
        ends = [choice.end for choice in self.choices if choice.end is not None]
        if len(ends) < len(self.choices):
            raise ValueError("an answer has no end")
        return ends

    def written(self, id_: str, kind: str, model: str, usage: dict[str, Any], fingerprint: str) -> Iterator[bytes]:
        """Yield the object; `kind`: its `object`. Several answers tell their own times as well.

        `fingerprint`: that of what computed it; empty: not known.
        """
        ends = self.ends
        choices = [
            choice.object(number, end) for number, (choice, end) in enumerate(zip(self.choices, ends, strict=True))
        ]
        if len(ends) > 1:
            for choice, end in zip(choices, ends, strict=True):
                choice["timings"] = timings_object(end.timings)
        document = {
            "id": id_,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": usage,
            "timings": timings_object(ends[0].timings),
        }
        document |= self.choices[0].verbose(ends[0])
        return in_parts(document | ({"system_fingerprint": fingerprint} if fingerprint else {}))
