"""What an answer becomes on its tape, however its bytes are cut."""

from __future__ import annotations

import json

import pytest

from gateway.bench.connection import Reading, Tape

STREAM = {b"content-type": b"text/event-stream; charset=utf-8", b"x-queue-position": b"3"}


def event(**more: object) -> str:
    return f"data: {json.dumps(more)}\n\n"


def delta(**fields: object) -> str:
    return event(choices=[{"index": 0, "delta": fields}])


ANSWER = "".join(
    [
        ": waiting position=3 wait_s=1.5\n\n: waiting position=1 wait_s=0.5\n\n",
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="Hé"),
        delta(content="llo"),
        delta(tool_calls=[{"index": 0}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], timings={"cache_n": 7}),
        event(choices=[], usage={"prompt_tokens": 20, "completion_tokens": 6}),
        "data: [DONE]\n\n",
    ]
)


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_stream_however_it_is_cut(size: int, ends: str) -> None:
    tape = Tape(10.0)
    reading = Reading(tape)
    reading.begin(200, STREAM)
    raw = ANSWER.replace("\n", ends).encode()
    for number, at in enumerate(range(0, len(raw), size)):
        reading.feed(raw[at : at + size], 11.0 + number)
    reading.finish(1e6)
    assert (tape.error, tape.tokens, tape.prompt_tokens, tape.cached_tokens) == ("", 6, 20, 7)
    assert len(tape.times) == 4
    assert tape.ttft_s >= 1.0
    assert "".join(reading.said) == "Héllo"
    assert (tape.position, tape.wait_s) == (3, 1.5)
    assert tape.good


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (500, {}, "boom", "http_500"),
        (200, {b"content-type": b"application/json"}, "{}", "unreadable"),
        (200, STREAM, delta(content="a"), "cut"),
        (200, STREAM, "data: [DONE]\n\n", "empty"),
        (200, STREAM, "data: {nonsense}\n\ndata: [DONE]\n\n", "unreadable"),
        (200, STREAM, delta(content="a") + event(error={"message": "no"}) + "data: [DONE]\n\n", "in_stream"),
    ],
)
def test_what_went_wrong(status: int, headers: dict[bytes, bytes], body: str, kind: str) -> None:
    tape = Tape(0.0)
    reading = Reading(tape)
    reading.begin(status, headers)
    reading.feed(body.encode(), 1.0)
    reading.finish(2.0)
    assert tape.error == kind
    assert tape.detail
    assert not tape.good


def test_a_place_in_line_is_told_before_there_is_a_worker() -> None:
    tape = Tape(10.0)
    reading = Reading(tape)
    reading.begin(200, {b"content-type": STREAM[b"content-type"]})
    reading.feed(b": waiting position=2 for=worker\n\n: waiting position=1 for=worker\n\n", 11.0)
    assert (tape.position, tape.wait_s) == (2, None)
    reading.feed(b": waiting position=1 wait_s=0.5\n\n", 12.0)
    assert (tape.position, tape.wait_s) == (2, 0.5)
