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

SLOTS, TOKENS = 2, 2000
"""An answer is longer than the kernel's buffers, and fits the gateway's."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("pool", "--step-ms", "0.2", "--tokens", str(TOKENS), worker_id="pool-a", slots=SLOTS)
        running.gateway(queue_timeout_s=3.0, stream_buffer_events=TOKENS + 48)
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
