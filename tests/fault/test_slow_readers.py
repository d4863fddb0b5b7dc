"""A caller that does not read is cut off at its bound; those beside it on the same worker notice nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.fault.scene import staged
from tests.support.stack import Process, Stack
from tests.support.waiting import until

MODEL, SLOW_ID = "pool", "slow-reader"
BUFFER_EVENTS = 64
GAP_S = 1.0


@contextmanager
def asking_without_reading(gateway: Process, key: str) -> Iterator[socket.socket]:
    """Much text per token, so that the kernel's buffers are full soon."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me everything."}],
            "max_tokens": 4000,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    url = urlsplit(gateway.url)
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {url.netloc}", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", f"X-Request-ID: {SLOW_ID}", "", body]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.hostname, url.port))
        connection.sendall("\r\n".join(lines).encode())
        yield connection


@pytest.mark.long
async def test_cut_off_at_its_bound(stack: Stack) -> None:
    gateway = stack.gateway(wait=False, stream_buffer_events=BUFFER_EVENTS)
    async with staged(stack, ()) as scene:
        await scene.await_worker(MODEL, scene.worker(MODEL, "--step-ms", "4", slots=4, wait=False))
        await scene.all_seen(MODEL)
        with asking_without_reading(gateway, stack.key):
            beside = [scene.book.ask(gateway, MODEL, 1200) for _ in range(3)]
            await asyncio.gather(*(record.has_begun() for record in beside))
            assert stack.leases(MODEL) == 4
            cut_s = await until(lambda: '"client_too_slow"' in gateway.text(), 20, "the slow reader is cut off")
            freed_s = await until(lambda: stack.leases(MODEL) < 4, 1, "its slot is free")
        await scene.ends(beside)
        assert {record.ending for record in beside} == {"answered"}
        longest = max(record.longest_gap_s for record in beside)
        assert longest < GAP_S
        print(f"\ncut off after {cut_s:.1f} s, slot free {freed_s * 1000:.0f} ms later, others waited {longest:.2f} s")
        await scene.report("a slow reader", 2.0)
