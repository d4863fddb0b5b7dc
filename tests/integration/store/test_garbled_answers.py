"""What comes of answers of Redis that are no answers: bytes were lost or changed on their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError

from gateway.errors import StoreUnavailable
from gateway.store.client import Store, connect
from tests.support.redis_server import RedisServer
from workers.redis import link as redis_link
from workers.redis.channel import follow

WAIT_S = 10.0


@asynccontextmanager
async def garbling(server: RedisServer, change: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """The URL of a proxy that changes what the server says."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, to: Callable[[bytes], bytes]) -> None:
        try:
            while data := await source.read(65536):
                target.write(to(data))
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told, teller = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, teller, bytes), pump(told, writer, change), return_exceptions=True)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/0"
    finally:
        proxy.close()


class Once:
    """Changes the first answer that holds certain bytes."""

    def __init__(self, old: bytes, new: bytes) -> None:
        self.old, self.new, self.done = old, new, False

    def __call__(self, data: bytes) -> bytes:
        if self.done or self.old not in data:
            return data
        self.done = True
        return data.replace(self.old, self.new)


async def test_every_call_of_a_batch_of_scripts_is_answered(server: RedisServer, client: redis.asyncio.Redis) -> None:
    """None was: the sender ended, and all of them, of every team, waited as long as their callers did."""
    bad = b":zz\r\n"
    change = {b":0\r\n": bad}
    async with (
        garbling(server, lambda data: data.replace(b":0\r\n", change.get(b":0\r\n", b":0\r\n"))) as url,
        connect(url) as garbled,
    ):
        store = Store(garbled)
        asked = [asyncio.ensure_future(store.withdraw("g1", "m", [id])) for id in "abc"]
        _, waiting = await asyncio.wait(asked, timeout=WAIT_S)
        assert not waiting
        assert [type(one.exception()) for one in asked] == [StoreUnavailable] * 3
        change.clear()
        assert await store.withdraw("g1", "m", ["a"]) == 0
        await store.close()


@pytest.mark.parametrize("bad", [b":zz\r\n", b"*1\r\n" * 5000])
async def test_it_counts_as_a_broken_connection(server: RedisServer, client: redis.asyncio.Redis, bad: bytes) -> None:
    async with garbling(server, Once(b":0\r\n", bad)) as url, redis_link.connect(url, timeout_s=2.0, retries=0) as link:
        with pytest.raises(ConnectionError, match="no answer"):
            await link.exists("nothing")
        assert await link.exists("nothing") == 0
    async with garbling(server, Once(b":0\r\n", bad)) as url, redis_link.connect(url, timeout_s=2.0, retries=0) as link:
        async with link.pipeline(transaction=False) as pipe:
            pipe.exists("nothing")
            with pytest.raises(ConnectionError):
                await pipe.execute()
        assert await link.exists("nothing") == 0


async def test_a_channel_is_followed_again(server: RedisServer, client: redis.asyncio.Redis) -> None:
    """The loop ended by it, and so did the gateway."""
    heard, subscribed = asyncio.Event(), asyncio.Semaphore(0)
    async with (
        garbling(server, Once(b"$5\r\nfirst", b"$zz\r\nfirst")) as url,
        connect(url) as link,
    ):
        following = asyncio.create_task(follow(link, "news", lambda _: heard.set(), subscribed.release))
        await asyncio.wait_for(subscribed.acquire(), WAIT_S)
        await client.publish("news", "first")
        await asyncio.wait_for(subscribed.acquire(), WAIT_S)
        await client.publish("news", "second")
        await asyncio.wait_for(heard.wait(), WAIT_S)
        assert not following.done()
        following.cancel()
        await asyncio.wait({following})
