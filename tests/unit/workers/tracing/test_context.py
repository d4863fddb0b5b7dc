"""W3C Trace Context: what is read, what is as if it were not there, what is written."""

from __future__ import annotations

import pytest

from workers.tracing.span import MAX_STATE_CHARS, TraceContext, new_context, read_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_parent_is_read_and_written() -> None:
    context = read_context(f"00-{TRACE}-{SPAN}-01", "a=1,b=2")
    assert context == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert context.traceparent == f"00-{TRACE}-{SPAN}-01"
    within = context.inside()
    assert (within.trace_id, within.state, within.is_sampled) == (TRACE, "a=1,b=2", True)
    assert within.span_id != SPAN


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_only_the_flag_that_is_known_counts(flags: str, is_sampled: bool) -> None:
    context = read_context(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.is_sampled is is_sampled
    assert context.traceparent.endswith("-01" if is_sampled else "-00")


def test_later_versions_may_say_more() -> None:
    assert read_context(f"cc-{TRACE}-{SPAN}-01-what-comes") == TraceContext(TRACE, SPAN)
    assert read_context(f"cc-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01x",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01" + "-x" * 1000,
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_malformed_is_as_if_it_were_not_there(text: str) -> None:
    assert read_context(text) is None


@pytest.mark.parametrize(
    "state", ["a=" + "x" * MAX_STATE_CHARS, ",".join(f"k{n}=v" for n in range(33)), "a=\x00", "a=é"]
)
def test_a_state_that_is_too_much_is_dropped_alone(state: str) -> None:
    assert read_context(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN)


def test_a_trace_begins() -> None:
    first, second = new_context(), new_context()
    assert first.trace_id != second.trace_id
    assert read_context(first.traceparent) == first
