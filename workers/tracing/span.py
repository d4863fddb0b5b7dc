"""The spans of a trace, each made when it is over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum

import msgspec

from workers.tracing.context import TraceContext

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]

PROVIDER = "paddock"
"""Value of `gen_ai.provider.name`, in spans and in metrics."""


class Kind(IntEnum):
    """The kinds of spans, as OTLP numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanEvent(msgspec.Struct, frozen=True):
    """An event within a span."""

    name: str
    at: float
    """Time of the event, time.monotonic()."""
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True):
    """One span. Times are time.monotonic() of the process that made it; attributes with empty texts are not sent."""

    name: str
    context: TraceContext
    """The span's own context."""
    parent_id: str
    """Id of the span that it lies in; empty: the trace begins with it."""
    began_at: float
    ended_at: float
    kind: Kind = Kind.INTERNAL
    attributes: Attributes = {}
    error: str = ""
    """Code of the failure; empty: nothing failed."""
    events: tuple[SpanEvent, ...] = ()
    links: tuple[TraceContext, ...] = ()


class WallClock:
    """Turns time.monotonic() into Unix time, by the two clocks' difference when it was made."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, at: float) -> int:
        return int(at * 1e9) + self._offset_ns
