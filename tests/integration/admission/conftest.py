"""Gateways' admission on a real Redis: as many as a test wants, each with its own client, any of them may be killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import pytest
import redis.asyncio

from gateway.admission.admission import Admission
from gateway.registry.fleet import Fleet
from gateway.registry.model_states import ModelStates
from gateway.store.client import Store, connect
from tests.integration.store.conftest import client, server
from tests.support.pool import SECRET
from tests.support.redis_server import RedisServer

__all__ = ["client", "server"]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Shorter than the defaults, in the same proportions where a test does not say otherwise."""

    lease_ttl_s: float = 0.9
    grant_ttl_s: float = 1.0
    ticket_ttl_s: float = 0.75
    renew_s: float = 0.3
    sweep_s: float = 0.15
    timeout_s: float = 2.0
    known_after_s: float = 2.0
    settle_s: float = 0.3


@dataclass(frozen=True, slots=True)
class Gateway:
    """What one gateway process has of admission."""

    id: str
    admission: Admission
    fleet: Fleet
    states: ModelStates
    store: Store
    redis: redis.asyncio.Redis
    tasks: tuple[asyncio.Task[None], ...]
    lost: list[tuple[str, str, int]] = field(default_factory=list)
    """Leases that ended otherwise than by their call, as they were told."""

    async def kill(self) -> None:
        """It stops doing anything; nothing is given back."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


Start = Callable[..., Awaitable[Gateway]]


async def _start(url: str, stack: AsyncExitStack, id: str, max_queue: int, lives: Lifetimes) -> Gateway:
    connected = await stack.enter_async_context(connect(url))
    store = Store(
        connected,
        lease_ttl_s=lives.lease_ttl_s,
        grant_ttl_s=lives.grant_ttl_s,
        settle_s=lives.settle_s,
        timeout_s=lives.timeout_s,
    )
    fleet = Fleet(connected, SECRET, interval_s=0.1)
    states = ModelStates(connected)
    lost: list[tuple[str, str, int]] = []
    admission = Admission(
        store,
        fleet,
        id,
        max_queue=max_queue,
        ticket_ttl_s=lives.ticket_ttl_s,
        renew_s=lives.renew_s,
        sweep_s=lives.sweep_s,
        known_after_s=lives.known_after_s,
        lost=lambda *told: lost.append(told),
        states=states,
    )
    await fleet.refresh()
    tasks = tuple(asyncio.create_task(part.run()) for part in (fleet, states, admission))
    gateway = Gateway(id, admission, fleet, states, store, connected, tasks, lost)
    stack.push_async_callback(admission.close)
    stack.push_async_callback(gateway.kill)
    return gateway


@pytest.fixture
async def start_on() -> AsyncIterator[Start]:
    """`await start_on(url, "g1")`: one more gateway on that Redis, closed at the end of the test."""
    async with AsyncExitStack() as stack:

        async def one_more(url: str, id: str, max_queue: int = 1000, lives: Lifetimes | None = None) -> Gateway:
            return await _start(url, stack, id, max_queue, lives or Lifetimes())

        yield one_more


@pytest.fixture
def start(server: RedisServer, client: redis.asyncio.Redis, start_on: Start) -> Start:
    """`await start("g1")`: one more gateway on the test's Redis, which was emptied before."""
    return partial(start_on, server.url)
