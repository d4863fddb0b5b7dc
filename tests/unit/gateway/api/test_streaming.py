"""A stream of events as ASGI messages: one event is one chunk of the response."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from gateway.api.http.streaming import DONE, PING, EventStream, LongEvent, Written, split, written


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        (b"", [b""]),
        (b"data: 1\n\n", [b"data: 1\n\n"]),
        (b"event: a\ndata: 1\n\ndata: 2\n\n", [b"event: a\ndata: 1\n\n", b"data: 2\n\n"]),
        (b"data: 1\n\nhalf", [b"data: 1\n\n", b"half"]),
    ],
)
def test_a_body_is_cut_between_events(body: bytes, pieces: list[bytes]) -> None:
    assert split(body) == pieces
    assert b"".join(split(body)) == body


async def test_each_event_is_a_message_of_its_own() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(send, lambda: [(b"x", b"y")])
    await stream.start()
    await stream.start()
    await written(stream.write(b"data: 1\n\n"))
    await written(stream.write(b"data: 2\n\ndata: 3\n\n"))
    await stream.end(b"data: 4\n\ndata: [DONE]\n\n")
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 5
    bodies = [message["body"] for message in sent[1:]]
    assert bodies == [b"data: %d\n\n" % number for number in (1, 2, 3, 4)] + [b"data: [DONE]\n\n"]
    assert [message["more_body"] for message in sent[1:]] == [True] * 4 + [False]


async def test_an_event_is_written_as_a_chunk_if_the_server_can_and_sent_if_not() -> None:
    came, room = list[tuple[str, bytes]](), 1

    async def send(message: Any) -> None:
        came.append(("send", message.get("body", b"")))

    def chunk(body: bytes) -> bool:
        nonlocal room
        if room:
            came.append(("chunk", body))
            room -= 1
            return True
        return False

    stream = EventStream(send, list, chunk=chunk)
    await stream.start()
    assert stream.write(b"data: 1\n\n") is None, "nothing to wait for"
    rest = stream.write(b"data: 2\n\n")
    assert rest is not None
    await rest
    room = 2
    assert stream.write(b"data: 3\n\ndata: 4\n\n") is None, "each event is a chunk"
    room = 1
    await written(stream.write(b"data: 5\n\ndata: 6\n\n"))
    await stream.end(b"data: [DONE]\n\n")
    assert [way for way, body in came] == ["send", "chunk", "send", "chunk", "chunk", "chunk", "send", "send"]
    assert b"".join(body for _, body in came) == b"".join([b"data: %d\n\n" % n for n in range(1, 7)]) + DONE


@pytest.mark.parametrize("is_last", [False, True])
async def test_others_get_their_turn_between_the_parts_of_a_long_event(is_last: bool) -> None:
    turn, sent, made = 0, list[tuple[int, bytes]](), list[int]()

    async def send(message: Any) -> None:
        sent.append((turn, message.get("body", b"")))

    def parts() -> Iterator[bytes]:
        for number in range(5):
            made.append(turn)
            yield b"%d" % number

    async def beat() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    stream, beating = EventStream(send, list), asyncio.create_task(beat())
    await stream.start()
    body: Written = [b"data: a\n\n", LongEvent(parts(), iter(())), b"data: b\n\n"]
    await (stream.end(body) if is_last else written(stream.write(body)))
    beating.cancel()
    assert b"".join(part for _, part in sent) == b"data: a\n\n01234data: b\n\n"
    assert len(set(made)) == 5
    assert made == [when for when, part in sent if part.isdigit()], "each is made when it is sent"


async def test_a_comment_comes_only_where_nothing_else_does() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    words = chain((PING,), repeat(b": waiting\n\n"))
    stream = EventStream(send, list, lambda: next(words))

    async def writing() -> str:
        await asyncio.sleep(0.03)
        assert sent == [b"", PING], "the headers go out with it"
        for _ in range(3):
            await written(stream.write(b"data: 1\n\ndata: 2\n\n"))
            await asyncio.sleep(0.01)
        assert sent.count(PING) == 1
        await asyncio.sleep(0.05)
        return "done"

    assert await stream.pinged(writing(), 0.02) == "done"
    assert sent[-1] == b": waiting\n\n", "each says what is so by then"
    num_sent = len(sent)
    await asyncio.sleep(0.05)
    assert len(sent) == num_sent, "no comments come when it is over"


@pytest.mark.parametrize("as_chunk", [False, True])
async def test_nothing_goes_before_the_head_that_a_ping_sends(as_chunk: bool) -> None:
    """A client that still read the answer before this one got a token's chunk, and then the head of its response."""
    sent, reads = list[bytes](), asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            await reads.wait()
        sent.append(message.get("body", b"head"))

    def chunk(body: bytes) -> bool:
        if as_chunk:
            sent.append(body)
        return as_chunk

    async def writing() -> None:
        await asyncio.sleep(0.03)
        await stream.start()
        await written(stream.write(b"data: a\n\n"))

    stream = EventStream(send, list, chunk=chunk)
    responder = asyncio.create_task(stream.pinged(writing(), 0.01))
    await asyncio.sleep(0.06)
    assert not sent
    reads.set()
    await responder
    assert sent[0] == b"head"
    assert b"data: a\n\n" in sent


async def test_a_stream_that_fails_while_a_ping_waits_to_send_the_head_has_not_started() -> None:
    """What ended it was then written as an event, before which there was no head: the connection broke."""

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    async def writing() -> str:
        await asyncio.sleep(0.03)
        return "failed"

    stream = EventStream(send, list)
    assert await stream.pinged(writing(), 0.01) == "failed"
    assert not stream.started


@pytest.mark.parametrize("blocked_at", range(1, 5))
async def test_no_ping_comes_between_the_parts_of_an_event(blocked_at: int) -> None:
    """A client that read nothing for longer than a ping's interval got one in the middle of an event's JSON."""
    sent, reads, told = list[bytes](), asyncio.Event(), itertools.count(1)

    async def send(message: Any) -> None:
        if next(told) > blocked_at:
            await reads.wait()
        sent.append(message.get("body", b""))

    async def writing() -> None:
        await stream.start()
        await written(stream.write(b"data: a\n\n"))
        await written(stream.write([LongEvent(iter([b"data: [1,", b"2,", b"3]", b"\n\n"]), iter(()))]))

    stream = EventStream(send, list)
    responder = asyncio.create_task(stream.pinged(writing(), 0.02))
    await asyncio.sleep(0.1)
    reads.set()
    await responder
    assert b"data: [1,2,3]\n\n" in b"".join(sent)


async def test_who_is_cut_off_while_pinged_ends_what_is_written() -> None:
    ended = asyncio.Event()

    async def send(message: Any) -> None:
        """Goes nowhere."""

    async def writing() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    responder = asyncio.create_task(EventStream(send, list).pinged(writing(), 0.01))
    await asyncio.sleep(0.03)
    responder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await responder
    assert ended.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nor are comments left running"
