"""A crowd without a key on keep-alive connections delays neither streams nor new calls of those who have one."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from socket import create_connection, socket
from urllib.parse import urlsplit

import pytest

from tests.support.caller import calling
from tests.support.stack import Process, Stack
from tests.support.waiting import until

NUM_CROWD = 300
MOST_BEFORE = NUM_CROWD // 3
"""Of the crowd's requests that may begin before one that came after all of them; it was all of them."""
KEYLESS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("quick", "--step-ms", "5", "--tokens", "100")
        running.gateway()
        yield running


def connected(gateway: Process) -> socket:
    url = urlsplit(gateway.url)
    return create_connection((url.hostname, url.port), timeout=10)


def with_key(path: str, stack: Stack, *more: str) -> bytes:
    return "\r\n".join(
        [f"GET {path} HTTP/1.1", "host: x", f"authorization: Bearer {stack.key}", *more, "", ""]
    ).encode()


def ended(gateway: Process, since: int) -> list[tuple[str, int]]:
    """Path and status of each request that ended since then, in that order."""
    lines = [json.loads(line) for line in gateway.text()[since:].splitlines() if line.endswith("}")]
    return [(line["path"], line["status"]) for line in lines if line.get("message") == "request"]


async def test_calls_of_a_known_key_do_not_stand_behind_a_crowd(stack: Stack) -> None:
    """All are there when the gateway looks, those with a key after the crowd: one on a connection that was open, one on
    a new one, one WebSocket.
    """
    gateway = stack.gateways[0]
    async with calling(gateway.url, stack.key, "quick") as caller, caller.stream(max_tokens=100) as stream:
        await stream.until_text()
        with ExitStack() as held:
            crowd = [held.enter_context(connected(gateway)) for _ in range(NUM_CROWD)]
            kept = held.enter_context(connected(gateway))
            kept.sendall(with_key("/v1/models/first", stack))
            assert kept.recv(1 << 16)
            since = len(gateway.text())
            gateway.signal(signal.SIGSTOP)
            try:
                for connection in crowd:
                    connection.sendall(KEYLESS)
                kept.sendall(with_key("/v1/models/kept", stack))
                held.enter_context(connected(gateway)).sendall(with_key("/v1/models/new", stack))
                socket_key = base64.b64encode(bytes(16)).decode()
                upgrade = (
                    "upgrade: websocket",
                    "connection: upgrade",
                    "sec-websocket-version: 13",
                    f"sec-websocket-key: {socket_key}",
                )
                held.enter_context(connected(gateway)).sendall(with_key("/v1/no-such-socket", stack, *upgrade))
            finally:
                gateway.signal(signal.SIGCONT)
            await until(lambda: len(ended(gateway, since)) >= NUM_CROWD + 3, 10.0, "all are answered")
            order = [path for path, _ in ended(gateway, since)]
            for path in ("/v1/models/kept", "/v1/models/new", "/v1/no-such-socket"):
                assert order[: order.index(path)].count("/v1/models") <= MOST_BEFORE, path
            for connection in crowd:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        await stream.finish()
        assert stream.done
