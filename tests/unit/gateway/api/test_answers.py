"""Whole answers in parts: what is encoded already is never joined at once, and what is sent is waited for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from starlette.types import Message, Send

from gateway.api.http.answers import JSON, PART_BYTES, EncodedArray, in_parts, send_bytes, send_json, send_parts
from gateway.api.http.streaming import UNREAD_BYTES, EventStream
from gateway.telemetry.request_log import RequestLog

LONG = b"x" * (4 * PART_BYTES + 1)


def test_what_is_encoded_already_is_joined_part_by_part() -> None:
    """Joining and writing 20 MB at once held up every stream of a gateway for 150 ms."""
    entries = [{"number": number, "text": "y" * 1000} for number in range(5000)]
    encoded = EncodedArray([msgspec.json.encode(entry) for entry in entries])
    document = {"choices": [{"content": encoded, "last": 1}], "none": EncodedArray([]), "odd": "a\0b"}
    parts = list(in_parts(document))
    assert max(map(len, parts)) < 2 * PART_BYTES
    assert len(parts) > 5_000_000 // (2 * PART_BYTES)
    assert json.loads(b"".join(parts)) == {
        "choices": [{"content": entries, "last": 1}],
        "none": [],
        "odd": "a\0b",
    }


def test_a_document_without_such_arrays_is_one_part() -> None:
    assert list(in_parts({"a": [1, "\0"]})) == [b'{"a":[1,"\\u0000"]}']


def test_one_entry_may_be_longer_than_a_part() -> None:
    entry = msgspec.json.encode("x" * 3 * PART_BYTES)
    assert b"".join(in_parts(EncodedArray([entry, entry]))) == b"[" + entry + b"," + entry + b"]"


def request_log() -> RequestLog:
    return RequestLog("r", "GET", "/")


async def _long_bytes(send: Send) -> None:
    await send_bytes(send, LONG, JSON, request_log())


async def _long_json(send: Send) -> None:
    await send_json(send, {"text": LONG.decode()}, request_log())


async def _long_parts(send: Send) -> None:
    await send_parts(send, iter((b"[", LONG)), JSON, request_log())


async def _long_event(send: Send) -> None:
    await EventStream(send, list).end(b"data: 1\n\ndata: " + LONG + b"\n\n")


SENT = (_long_bytes, _long_json, _long_parts, _long_event)


@pytest.mark.parametrize("answer", SENT)
async def test_a_long_answer_lasts_until_it_has_been_read(answer: Callable[[Send], Awaitable[None]]) -> None:
    """uvicorn waits at the start of a message, so the last one returned with megabytes of it in the transport."""
    room, unread = asyncio.Event(), 0
    room.set()

    async def send(message: Message) -> None:
        nonlocal unread
        await room.wait()
        unread += len(message.get("body", b""))
        if unread > UNREAD_BYTES:
            room.clear()

    responder = asyncio.ensure_future(answer(send))
    async with asyncio.timeout(5):
        while not responder.done():
            if not room.is_set():
                unread = 0
                room.set()
            await asyncio.sleep(0)
    await responder
    assert unread <= UNREAD_BYTES, "what is left when its counts are given back"


@pytest.mark.parametrize("num_bytes", [0, 1, UNREAD_BYTES, UNREAD_BYTES + 1, 3 * PART_BYTES])
async def test_answers_arrive_whole_and_short_ones_in_one_message(num_bytes: int) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = b"x" * num_bytes
    await send_bytes(send, body, JSON, request_log())
    assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % num_bytes
    assert b"".join(message["body"] for message in sent[1:]) == body
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert (len(sent) == 2) == (num_bytes <= UNREAD_BYTES)
