"""Server-sent events, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client.receiver import EventTooLong, SseEvent, SseReader

TEXT = ': hello\n\nid: a-1\ndata: {"x": 1}\n\ndata: two\ndata:lines\n\nid: 7\n\nevent: e\ndata: é\n\ndata: unfinished'
EVENTS = [SseEvent("a-1", b'{"x": 1}'), SseEvent("", b"two\nlines"), SseEvent("", "é".encode())]


def read(chunks: list[bytes]) -> list[SseEvent]:
    reader = SseReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


@given(st.lists(st.integers(0, 200), max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_the_cuts_do_not_matter(cuts: list[int], end: str) -> None:
    raw = TEXT.replace("\n", end).encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    chunks = [raw[a:b] for a, b in itertools.pairwise(places)]
    # With lone CRs the last line's end might still become a CRLF.
    assert read([*chunks, b"\n"]) == EVENTS


def test_an_event_without_end_is_refused() -> None:
    reader = SseReader(max_event_bytes=100)
    assert reader.feed(b"data: " + b"x" * 90 + b"\n\n") != []
    assert reader.feed(b"data: " + b"x" * 60 + b"\n") == []
    with pytest.raises(EventTooLong, match="100 bytes"):
        reader.feed(b"data: " + b"x" * 60 + b"\n")
    with pytest.raises(EventTooLong):
        SseReader(max_event_bytes=100).feed(b"data: " + b"x" * 100)
