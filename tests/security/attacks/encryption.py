"""Attacks by TLS: what is sent before anything is known of its sender, or after the connection was closed, without a
key. They are made beforehand, so that all connections send at the same moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from tests.security.attack import Attack, Fleet, Target
from tests.support.tls_peer import IS_THERE, READ_BYTES, TlsPeer, in_fragments

NUM_PEERS, NUM_RECORDS = 24, 10_000
NUM_CLOSED, NUM_AFTER = 48, 15_000
NUM_HELLOS, NUM_FRAGMENTED = 400, 200
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
UPDATES_BEFORE_CONTENT = 9
GIVES_UP_S = 10.0
SETTLES_S = 0.5

Opened = tuple[TlsPeer, asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def _connected(target: Target) -> AsyncGenerator[Opened]:
    address = urlsplit(target.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        with TlsPeer() as peer:
            yield peer, reader, writer
    finally:
        writer.transport.abort()


async def _shake_hands(opened: Opened) -> None:
    peer, reader, writer = opened
    async with asyncio.timeout(GIVES_UP_S):
        while not peer.shake_hands():
            writer.write(peer.encrypted())
            peer.received(await reader.read(READ_BYTES))
        writer.write(peer.encrypted())


async def _send(opened: Opened, sent: bytes) -> None:
    """Send this, as far as it is taken, and throw away what comes."""
    _, reader, writer = opened
    writer.write(sent)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(GIVES_UP_S):
            await writer.drain()
            while await reader.read(READ_BYTES):
                pass


@contextlib.asynccontextmanager
async def _peers(target: Target, count: int) -> AsyncGenerator[list[Opened]]:
    async with contextlib.AsyncExitStack() as held:
        opened = [await held.enter_async_context(_connected(target)) for _ in range(count)]
        await asyncio.gather(*map(_shake_hands, opened))
        yield opened


async def _send_together(opened: list[Opened]) -> None:
    sent = [peer.encrypted() for peer, _, _ in opened]
    await asyncio.gather(*map(_send, opened, sent))


async def _key_updates(target: Target) -> None:
    async with _peers(target, NUM_PEERS) as opened:
        for number, (peer, _, _) in enumerate(opened):
            peer.update_keys(NUM_RECORDS, asks=number % 2 == 0)
        await _send_together(opened)


async def _updates_between_bytes(target: Target) -> None:
    async with _peers(target, NUM_PEERS) as opened:
        for peer, _, _ in opened:
            peer.say(UPLOAD)
            for _ in range(NUM_RECORDS // (UPDATES_BEFORE_CONTENT + 1)):
                peer.update_keys(UPDATES_BEFORE_CONTENT)
                peer.say(b"x")
        await _send_together(opened)


async def _records_of_a_byte(target: Target) -> None:
    async with _peers(target, NUM_PEERS) as opened:
        for peer, _, _ in opened:
            peer.say(UPLOAD, *[b"x"] * NUM_RECORDS)
        await _send_together(opened)


async def _records_after_the_end(target: Target) -> None:
    async with _peers(target, NUM_CLOSED) as opened:
        for peer, _, writer in opened:
            peer.say(LAST)
            writer.write(peer.encrypted())
        for peer, _, _ in opened:
            peer.say(*[b"x"] * NUM_AFTER)
        await _send_together(opened)


async def _hello_crowd(target: Target) -> None:
    """Begin many handshakes at once, and end them at once."""
    async with contextlib.AsyncExitStack() as held:
        opened = [await held.enter_async_context(_connected(target)) for _ in range(NUM_HELLOS)]
        hellos = []
        for peer, _, _ in opened:
            peer.shake_hands()
            hellos.append(peer.encrypted())
        for (_, _, writer), hello in zip(opened, hellos, strict=True):
            writer.write(hello)
        await asyncio.sleep(SETTLES_S)
        for peer, reader, _ in opened:
            with contextlib.suppress(OSError, TimeoutError):  # refused
                async with asyncio.timeout(GIVES_UP_S):
                    peer.received(await reader.read(READ_BYTES))
                peer.shake_hands()
        for peer, _, writer in opened:
            writer.write(peer.encrypted())
        await asyncio.sleep(SETTLES_S)


async def _fragmented_hellos(target: Target) -> None:
    async with contextlib.AsyncExitStack() as held:
        opened = [await held.enter_async_context(_connected(target)) for _ in range(NUM_FRAGMENTED)]
        hellos = []
        for peer, _, _ in opened:
            peer.shake_hands()
            hellos.append(in_fragments(peer.encrypted(), 1))
        await asyncio.gather(*map(_send, opened, hellos))


ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="key-updates",
        about="24 connections send 10,000 KeyUpdates each: one read consumed them all, 78 to 160 ms of every stream.",
        strike=_key_updates,
        fleet=Fleet.ENCRYPTED,
        short_s=4.0,
    ),
    Attack(
        name="updates-between-bytes",
        about="The same with a byte of a body behind every nine, so that none is the tenth without content.",
        strike=_updates_between_bytes,
        fleet=Fleet.ENCRYPTED,
        short_s=4.0,
    ),
    Attack(
        name="records-of-a-byte",
        about="24 connections send 10,000 records of one byte each: 3.4 s of one turn of the event loop.",
        strike=_records_of_a_byte,
        fleet=Fleet.ENCRYPTED,
        short_s=4.0,
    ),
    Attack(
        name="records-after-the-end",
        about="48 connections that the gateway has closed send 15,000 records each: 0.4 s of one turn for 32.",
        strike=_records_after_the_end,
        fleet=Fleet.ENCRYPTED,
        short_s=4.0,
    ),
    Attack(
        name="hello-crowd",
        about="400 handshakes begin in one moment, and end in another: their second halves were done in one turn.",
        strike=_hello_crowd,
        fleet=Fleet.ENCRYPTED,
        short_s=4.0,
    ),
    Attack(
        name="fragmented-hellos",
        about="200 connections send the first packet of a handshake in records of one byte.",
        strike=_fragmented_hellos,
        fleet=Fleet.ENCRYPTED,
        short_s=2.5,
    ),
)
if not IS_THERE:  # without OpenSSL's library under a known name nobody here can send them
    ATTACKS = ()
