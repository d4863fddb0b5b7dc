"""How many connections a client has, and who waits for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import uvloop
from redis.exceptions import RedisError

from tests.support.redis_fleet import ClusterFleet
from tests.support.redis_server import RedisServer, redis_binaries
from workers.redis.channel import follow
from workers.redis.link import MAX_CONNECTIONS, connect

WAVE = 3 * MAX_CONNECTIONS
TIMEOUT_S = 10.0
"""On a busy machine; the client's own bound was reached at once."""


@pytest.fixture
async def link(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url, timeout_s=TIMEOUT_S, retries=0) as connected:
        yield connected


async def connections_at(server: RedisServer) -> int:
    async with connect(server.url, timeout_s=TIMEOUT_S, retries=0) as looking:
        return len(await looking.client_list()) - 1


async def test_a_wave_of_commands_waits_for_connections(server: RedisServer, link: redis.asyncio.Redis) -> None:
    """The client's own bound was taken for a Redis that is away, by everybody who asked it anything."""
    assert await asyncio.gather(*(link.echo(str(number)) for number in range(WAVE))) == [
        str(number).encode() for number in range(WAVE)
    ]
    assert await connections_at(server) <= MAX_CONNECTIONS


async def test_subscriptions_and_pipelines_leave_room_for_a_wave(link: redis.asyncio.Redis) -> None:
    heard, subscribed = asyncio.Event(), asyncio.Event()
    following = asyncio.create_task(follow(link, "news", lambda _: heard.set(), subscribed.set))
    await asyncio.wait_for(subscribed.wait(), TIMEOUT_S)

    async def piped(number: int) -> list[bytes]:
        async with link.pipeline(transaction=bool(number % 2)) as pipe:
            pipe.echo("a")
            pipe.echo("b")
            return list(await pipe.execute())

    assert await asyncio.gather(*(piped(number) for number in range(WAVE))) == [[b"a", b"b"]] * WAVE
    await link.publish("news", "now")
    await asyncio.wait_for(heard.wait(), TIMEOUT_S)
    following.cancel()
    await asyncio.wait({following})


async def test_connections_come_back_however_commands_end(link: redis.asyncio.Redis) -> None:
    for _ in range(5):
        wave = [asyncio.ensure_future(link.echo("x")) for _ in range(WAVE)]
        await asyncio.sleep(0.005)
        for one in wave[::2]:
            one.cancel()
        await asyncio.wait(wave)
        assert not [one for one in wave if not one.cancelled() and one.exception()]
    failing = await asyncio.gather(*(link.execute_command("NOPE") for _ in range(WAVE)), return_exceptions=True)  # type: ignore[no-untyped-call]
    assert all(isinstance(one, RedisError) and "unknown command" in str(one) for one in failing)
    assert await asyncio.gather(*(link.echo("x") for _ in range(WAVE))) == [b"x"] * WAVE


async def test_whoever_waits_for_a_connection_is_told_in_time(tmp_path: Path) -> None:
    """A server that takes connections and never answers."""
    path = tmp_path / "s"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    bound_s = 0.3
    async with (
        await asyncio.start_unix_server(serve, path),
        connect(f"unix://{path}", timeout_s=bound_s, retries=0) as client,
    ):
        began = time.monotonic()
        answers = await asyncio.gather(*(client.ping() for _ in range(WAVE)), return_exceptions=True)
        took_s = time.monotonic() - began
        assert all(isinstance(answer, RedisError | OSError) for answer in answers)
        assert took_s < 4 * bound_s


async def test_a_wave_on_a_cluster_waits_as_well() -> None:
    with ClusterFleet(redis_binaries()[0]) as fleet:
        async with connect(fleet.url, timeout_s=TIMEOUT_S, retries=0) as client:
            await client.set("a", "b")
            assert await asyncio.gather(*(client.get("a") for _ in range(WAVE))) == [b"b"] * WAVE


def test_a_connection_that_closes_as_it_is_written_to_counts_as_redis_away(server: RedisServer) -> None:
    """uvloop raises a RuntimeError then, which ended a gateway when its Redis was killed."""

    async def look() -> None:
        async with connect(server.url, timeout_s=TIMEOUT_S, retries=0) as link:
            connection: Any = await link.connection_pool.get_connection()  # type: ignore[no-untyped-call]
            connection._writer.transport.abort()
            with pytest.raises(redis.exceptions.ConnectionError, match="was closed as it was written to"):
                await connection.send_command("PING")
            await link.connection_pool.release(connection)
            assert await link.ping()

    uvloop.run(look())
