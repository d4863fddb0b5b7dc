"""A worker learns from Redis that a gateway does not beat any more, and from sockets that a machine is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import redis.asyncio

from gateway.store.client import connect
from gateway.store.heartbeats import GatewayHeartbeats
from tests.support.waiting import until
from workers.process.sockets import UNACKNOWLEDGED_S, listen, watched_socket
from workers.protocol import keys
from workers.protocol.framing import gateway_process
from workers.service.calls.stream import EventHub
from workers.service.registration.gateway_watch import GatewayWatch

PROCESS = gateway_process("g1", "0a0b")
GRACE_S = 0.3


@asynccontextmanager
async def watching(hub: EventHub, client: redis.asyncio.Redis) -> AsyncIterator[None]:
    watch = GatewayWatch(client, hub.gateways, hub.doubt, interval_s=0.02)
    running = asyncio.create_task(watch.run())
    yield
    running.cancel()
    await asyncio.wait([running])


async def test_the_calls_of_a_gateway_that_does_not_beat_are_given_up(client: redis.asyncio.Redis) -> None:
    lost = list[int]()
    hub = EventHub("boot", lost.append, grace_s=GRACE_S)
    await GatewayHeartbeats(client, "g1").beat()
    feed = hub.attach(PROCESS, None)
    hub.enter(PROCESS, 1, 77)
    async with watching(hub, client):
        await asyncio.sleep(0.2)
        assert not feed.closed
        await client.delete(keys.gateway("g1"))
        await until(lambda: feed.closed, 2.0, "its connection is closed")
        assert not lost
        await until(lambda: lost == [77], 2.0, "its call is given up after the grace period")


async def test_a_gateway_that_lives_comes_back_once_and_loses_nothing(client: redis.asyncio.Redis) -> None:
    """As where Redis has lost its data, or that gateway can't reach it."""
    lost = list[int]()
    hub = EventHub("boot", lost.append, grace_s=GRACE_S)
    await GatewayHeartbeats(client, "g1").beat()
    feed = hub.attach(PROCESS, None)
    hub.enter(PROCESS, 1, 77)
    async with watching(hub, client):
        await asyncio.sleep(0.1)
        await client.flushall()
        await until(lambda: feed.closed, 2.0, "its connection is closed")
        again = hub.attach(PROCESS, None)
        await asyncio.sleep(3 * GRACE_S)
        assert not again.closed
        assert not lost


async def test_a_gateway_that_is_gone_stays_no_longer_where_the_clock_of_redis_was_set_back(
    client: redis.asyncio.Redis,
) -> None:
    """Its last beat lay an hour ahead then, and it had its share of the slots for that hour."""
    seconds, _ = await client.time()
    await client.zadd(keys.GATEWAYS, {"gone": seconds + 3600, "g1": seconds + 3600})
    heartbeats = GatewayHeartbeats(client, "g1", ttl_s=0.3)
    first = await heartbeats.beat()
    assert first is not None
    assert first.stayed
    assert set(first.silent_s) == {"gone", "g1"}
    await asyncio.sleep(0.35)
    later = await heartbeats.beat()
    assert later is not None
    assert set(later.silent_s) == {"g1"}


async def test_a_gateway_that_never_beat_is_left_alone(client: redis.asyncio.Redis) -> None:
    hub = EventHub("boot", print, grace_s=GRACE_S)
    feed = hub.attach(PROCESS, None)
    async with watching(hub, client):
        await asyncio.sleep(0.3)
        assert not feed.closed


async def test_a_redis_that_is_away_tells_nothing() -> None:
    hub = EventHub("boot", print, grace_s=GRACE_S)
    feed = hub.attach(PROCESS, None)
    async with connect("unix:///nonexistent/redis.sock") as away, watching(hub, away):
        await asyncio.sleep(0.3)
        assert not feed.closed


def test_both_ends_of_a_connection_ask_whether_the_other_is_there() -> None:
    with closing(listen("127.0.0.1", 0)) as listener:
        here = watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ()))
        with closing(here):
            here.connect(listener.getsockname())
            listener.setblocking(True)
            there, _ = listener.accept()
            with closing(there):
                for end in (here, there):
                    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    if hasattr(socket, "TCP_USER_TIMEOUT"):
                        bound_ms = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                        assert bound_ms == UNACKNOWLEDGED_S * 1000
