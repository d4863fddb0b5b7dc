"""The trace context, as it travels in the headers `traceparent` and `tracestate`.

Source: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/). Malformed headers count as missing.
"""

from __future__ import annotations

import random
import re

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
    """One span of one trace, as the parent of whatever happens inside it."""

    trace_id: str
    """Id of the trace, 32 hexadecimal digits."""
    span_id: str
    """Id of the span, 16 hexadecimal digits."""
    is_sampled: bool = True
    """Whether the process that began the trace records it; then we do, too."""
    state: str = ""
    """The `tracestate` of tracing systems on the way, handed on as it is."""

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
    """Return a random span id; ids must differ, and are no secrets."""
    return f"{random.getrandbits(64) or 1:016x}"


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Return the context of the headers; None: missing or malformed. A malformed or long state alone is dropped."""
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
