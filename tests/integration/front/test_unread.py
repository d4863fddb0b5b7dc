"""Callers who don't read their answers: they keep no slot from others, and are cut off in the end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest

from tests.support.caller import calling
from tests.support.stack import Process, Stack
from tests.support.waiting import until

READER_TIMEOUT_S = 1.0
SLOTS, TOKENS = 2, 2000
"""An answer is longer than the kernel's buffers, and fits the gateway's."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("pool", "--step-ms", "0.2", "--tokens", str(TOKENS), worker_id="pool-a", slots=SLOTS)
        for patience_s in (30.0, READER_TIMEOUT_S):
            running.gateway(queue_timeout_s=3.0, stream_buffer_events=TOKENS + 48, reader_timeout_s=patience_s)
        yield running


@contextmanager
def asking_without_reading(gateway: Process, key: str) -> Iterator[socket.socket]:
    """A stream with much text per token."""
    messages = [{"role": "user", "content": "Tell me everything."}]
    body = json.dumps({"model": "pool", "messages": messages, "stream": True, "logprobs": True, "top_logprobs": 20})
    url = urlsplit(gateway.url)
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {url.netloc}", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.hostname, url.port))
        connection.sendall("\r\n".join(lines).encode())
        yield connection


async def test_an_answer_that_nobody_reads_holds_no_slot(stack: Stack) -> None:
    gateway = stack.gateways[0]
    with ExitStack() as sockets:
        for _ in range(SLOTS):
            sockets.enter_context(asking_without_reading(gateway, stack.key))
        await until(lambda: stack.leases("pool") == SLOTS, 5.0, "both have begun")
        await until(lambda: stack.leases("pool") == 0, 10.0, "the slots are given back when the answers are made")
        async with calling(gateway.url, stack.key, "pool") as caller:
            answers = await asyncio.gather(*(caller.whole(max_tokens=3) for _ in range(4)))
        assert [status for status, _ in answers] == [200] * 4
        assert "client_too_slow" not in gateway.text()


def is_cut(connection: socket.socket) -> bool:
    """Whether the other end is gone; nothing is read of what it sent before."""
    try:
        connection.send(b"\r\n")
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


async def test_a_reader_that_takes_nothing_is_cut_off(stack: Stack) -> None:
    gateway = stack.gateways[1]
    with asking_without_reading(gateway, stack.key) as connection:
        await until(lambda: stack.leases("pool") == 1, 5.0, "it has begun")
        await until(lambda: "whose peer does not read" in gateway.text(), 30.0, "it is cut off")
        await until(lambda: is_cut(connection), 2.0, "its connection is gone")
        await until(lambda: '"client_gone"' in gateway.text(), 2.0, "its call is over")


async def test_a_reader_that_pauses_for_less_gets_all(stack: Stack) -> None:
    gateway = stack.gateways[1]
    with asking_without_reading(gateway, stack.key) as connection:
        await asyncio.sleep(0.6 * READER_TIMEOUT_S)
        connection.setblocking(False)
        received, loop = b"", asyncio.get_running_loop()
        async with asyncio.timeout(20):
            while b"data: [DONE]" not in received[-200:]:
                received += await loop.sock_recv(connection, 1 << 20)
    assert received.count(b"data: ") >= TOKENS
