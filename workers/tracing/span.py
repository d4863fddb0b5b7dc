"""The spans of a trace, each made after the work that it describes has ended; and the context, sent in the headers
`traceparent` and `tracestate`, which joins the spans of several processes into one trace.

Source: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/). Malformed headers count as missing.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from enum import IntEnum

import msgspec

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"

MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32
SAMPLED = 0x01

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e\t]*")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_UNUSABLE_VERSION = "ff"
_OUR_VERSION = "00"


class TraceContext(msgspec.Struct, frozen=True):
    """Identifies one span of one trace, as the parent of the spans inside it."""

    trace_id: str
    """Id of the trace, 32 hexadecimal digits."""
    span_id: str
    """Id of the span, 16 hexadecimal digits."""
    is_sampled: bool = True
    """Whether the process that began the trace records it; if so, Paddock records it too."""
    state: str = ""
    """The `tracestate` of other tracing systems, handed on unchanged."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"

    def inside(self) -> TraceContext:
        """Return the context of a new span within this one."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled, self.state)


def new_context() -> TraceContext:
    """Return the context of the first span of a new trace."""
    return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id())


def new_span_id() -> str:
    """Return a random span id. Ids must differ but are not secret, so `random` is good enough."""
    return f"{random.getrandbits(64) or 1:016x}"


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Return the context in the headers; None: missing or malformed. A malformed or long `tracestate` is dropped."""
    found = _PARENT.fullmatch(traceparent.strip()) if len(traceparent) <= MAX_STATE_CHARS else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _UNUSABLE_VERSION or (version == _OUR_VERSION and more) or trace_id == _NO_TRACE:
        return None
    if span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED), _state(tracestate.strip()))


def _state(text: str) -> str:
    too_long = len(text) > MAX_STATE_CHARS or text.count(",") >= MAX_STATE_MEMBERS
    return "" if too_long or not _STATE.fullmatch(text) else text


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
    """Id of the span around this one; empty: the trace begins with this span."""
    began_at: float
    ended_at: float
    kind: Kind = Kind.INTERNAL
    attributes: Attributes = {}
    error: str = ""
    """Code of the failure; empty: nothing failed."""
    events: tuple[SpanEvent, ...] = ()
    links: tuple[TraceContext, ...] = ()


class WallClock:
    """Converts time.monotonic() to Unix time, by the difference of the two clocks when this object was made."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, at: float) -> int:
        return int(at * 1e9) + self._offset_ns
