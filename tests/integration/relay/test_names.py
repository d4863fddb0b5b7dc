"""Workers and Redis that are reached by names: names whose lookups hang keep nobody from those with other names."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace
from redis.exceptions import RedisError

from gateway.api.intake.disconnect import beside
from gateway.relay.event_source import read_events
from gateway.relay.relay import Relay
from gateway.store.client import connect
from tests.integration.relay.scripted import CALL, scripted_worker
from tests.integration.relay.test_relay import REQUEST
from tests.integration.relay.test_trust import SECRET
from tests.support.redis_fleet import ClusterFleet, SentinelFleet
from tests.support.redis_server import RedisServer
from tests.support.stack import free_port
from tests.support.tls_proxy import make_certificates, tls_in_front_of
from workers.protocol.queries import PROPS_PATH
from workers.redis.link import long_commands_of, short_commands_of

NUM_HUNG, NUM_TRIES = 4, 10
"""Names that hang, and how often each is looked up: more lookups in all than an event loop has threads for."""


@pytest.fixture(autouse=True)
async def _hung(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Many lookups hang during each test; `here.test` is this machine, and is looked up at once."""
    healed, real = threading.Event(), socket.getaddrinfo
    hung = {f"{secrets.token_hex(8)}.test" for _ in range(NUM_HUNG)}  # not those of the last test, which may hang still

    def look_up(host: Any, *rest: Any, **options: Any) -> Any:
        if host in hung:
            healed.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return real("127.0.0.1" if host == "here.test" else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    ends = await asyncio.gather(*map(_reach_in_vain, [*hung] * NUM_TRIES), return_exceptions=True)
    assert {type(end) for end in ends} == {TimeoutError}
    yield
    healed.set()


async def _reach_in_vain(name: str) -> None:
    await read_events(
        f"http://{name}:80/events",
        {},
        on_open=lambda: None,
        on_data=lambda data: 0.0,
        connect_timeout_s=0.05,
        silence_s=1.0,
    )


async def test_a_worker_by_another_name_is_reached() -> None:
    """Its events, its calls, and questions that take no slot: each has connections of its own."""
    async with scripted_worker() as worker:
        worker.reply = b"here"
        relay = Relay("gw", SECRET, 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            beat = replace(worker.heartbeat(), address=f"http://here.test:{worker.port}")
            relay.follow([beat])
            await worker.connected()
            async with relay.start(beat.at, CALL, REQUEST):
                await worker.submitted(1)
            assert await relay.ask(beat.at, "GET", PROPS_PATH, None, bytes, timeout_s=3.0) == b"here"


@contextmanager
def one_server() -> Iterator[str]:
    with RedisServer(port=free_port()) as server:
        yield f"redis://127.0.0.1:{server.port}"


@contextmanager
def behind_sentinels() -> Iterator[str]:
    with SentinelFleet() as fleet:
        yield fleet.url


@contextmanager
def a_cluster() -> Iterator[str]:
    with ClusterFleet() as fleet:
        yield fleet.url


@pytest.mark.parametrize("served", [one_server, behind_sentinels, a_cluster])
async def test_redis_by_another_name_is_reached(served: Callable[[], AbstractContextManager[str]]) -> None:
    with served() as url:
        async with connect(url.replace("127.0.0.1", "here.test")) as client, asyncio.timeout(10):
            while True:
                try:
                    await asked_in_each_way(client)
                    break
                except RedisError:  # on a busy machine Sentinels take a master for dead that is late
                    await asyncio.sleep(0.1)


async def asked_in_each_way(client: redis.asyncio.Redis) -> None:
    """Each has connections of its own."""
    assert await client.set("pd:{x}", "1")
    assert await short_commands_of(client).ask(("GET", "pd:{x}")) == [b"1"]
    assert await long_commands_of(client).ask(("GET", "pd:{x}"), timeout_s=2.0) == [b"1"]
    async with client.pubsub() as heard:
        await heard.subscribe("news")
        assert await heard.get_message(timeout=2.0) is not None


async def test_a_certificate_is_for_the_name_not_for_the_address(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    certificates = make_certificates(tmp_path)
    own = f"ssl_certfile={certificates.client}&ssl_keyfile={certificates.client_key}"
    with RedisServer() as server:
        async with tls_in_front_of(server.socket, certificates) as port:
            url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates.ca}&{own}"
            async with connect(url) as client:
                assert await short_commands_of(client).ask(("PING",)) == [b"PONG"]
            by_name = url.replace("127.0.0.1", "here.test")
            async with connect(by_name) as client:
                with pytest.raises((RedisError, OSError), match=r"certificate is not valid for .here\.test"):
                    await client.ping()
            async with connect(by_name) as client:
                with pytest.raises((RedisError, OSError), match=r"certificate is not valid for .here\.test"):
                    await short_commands_of(client).ask(("PING",))
