"""Limits of several gateway processes on one real Redis, each with a client of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis.asyncio

from accounts.protocol.records import Limits, PriceListRecord, SubjectKind
from gateway.access.directory import Directory
from gateway.call import Call, Principal, Subject
from gateway.limits.cost import Prices
from gateway.limits.limiter import RateLimits
from gateway.limits.reservation import Reservation
from gateway.limits.sync import LimitSync
from gateway.routing.pool import Pool
from gateway.store.client import connect
from gateway.store.limits import LimitStore
from gateway.telemetry.request_log import RequestLog
from tests.integration.store.conftest import server
from tests.support.pool import call as call_of
from tests.support.redis_server import RedisServer
from workers.protocol import keys
from workers.protocol.events import Usage
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.requests import GenerateRequest, Message

__all__ = ["server"]

REQUEST = GenerateRequest(messages=(Message("user", "x" * 40),), max_tokens=10)
ESTIMATE = 24
"""Tokens that it is estimated to take: 40 bytes, a message, 10 of the answer."""
ROUND_S = 0.3
WORKER = WorkerAddress("m", "w", "b", "http://w:1")


def subject(kind: SubjectKind = "key", name: str = "k", **limits: Any) -> Subject:
    return Subject(kind, name, Limits(**limits))


@dataclass(slots=True)
class Member:
    """One gateway process."""

    id: str
    limits: RateLimits
    sync: LimitSync
    client: redis.asyncio.Redis
    directory: Directory
    task: asyncio.Task[None]
    refused: list[tuple[str, str]] = field(default_factory=list)

    def reserve(self, *subjects: Subject, alias: str = "m", request: GenerateRequest = REQUEST) -> Reservation:
        holder = Principal("k", "team", None, admin=False, subjects=subjects)
        made: Call = replace(call_of(), principal=holder, alias=alias)
        log = RequestLog("id", "POST", "/")
        log.answer.model = "m"
        reservation = self.limits.reserve(made, (request,), log)
        assert reservation is not None
        return reservation

    async def begin(self, *subjects: Subject, **fields: Any) -> Reservation:
        """A call that is permitted and was sent to a worker. Raises what refuses it."""
        reservation = self.reserve(*subjects, **fields)
        try:
            await reservation.granted()
        except BaseException:
            self.limits.end(reservation)
            raise
        reservation.request_log.answer.begin_attempt(WORKER)
        return reservation

    def end(self, reservation: Reservation, prompt: int = 10, answer: int = 5) -> None:
        reservation.request_log.usage = Usage(prompt, answer, 0)
        self.limits.end(reservation)

    async def kill(self) -> None:
        """It stops doing anything; nothing is given back."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Start = Callable[..., Awaitable[Member]]


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url) as connected:
        await connected.flushall()
        yield connected


@pytest.fixture
async def start(server: RedisServer, client: redis.asyncio.Redis) -> AsyncIterator[Start]:
    """`await start("g1")`: one more gateway process on the test's Redis, which was emptied before."""
    async with AsyncExitStack() as stack:

        async def one_more(id: str, prices: PriceListRecord | None = None, ttl_s: float = 1.0) -> Member:
            connected = await stack.enter_async_context(connect(server.url_of("gateway")))
            store = LimitStore(connected, id, timeout_s=0.5, ttl_s=ttl_s, round_s=ROUND_S)
            directory = Directory()
            if prices is not None:
                directory.put(prices)
            refused: list[tuple[str, str]] = []
            limits = RateLimits(
                store, directory, Prices(directory), lambda model: Pool(), lambda *what: refused.append(what)
            )
            sync = LimitSync(limits, store, pulse_s=0.1)
            member = Member(id, limits, sync, connected, directory, asyncio.create_task(sync.run()), refused)
            stack.push_async_callback(member.kill)
            await until(lambda: limits.messages.ready)
            return member

        yield one_more


async def until(done: Callable[[], Any], within_s: float = 5.0) -> None:
    """Return when `done` returns something true, or awaits to it."""
    async with asyncio.timeout(within_s):
        while True:
            found = done()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


async def counted(client: redis.asyncio.Redis, name: str = "key:k") -> tuple[int, int, int]:
    """What Redis counts for a subject: requests, tokens, calls under way."""
    values: Any = await client.hmget(keys.limits_subject(name), ["w", "c"])
    window = values[0].split() if values[0] else [b"0", b"0", b"0"]
    return int(window[1]), int(window[2]), int(values[1].split()[1]) if values[1] else 0


async def opened(client: redis.asyncio.Redis) -> None:
    """Return when no round of reports keeps calls waiting."""

    async def is_open() -> bool:
        until_ms: Any = await client.hget(keys.LIMITS_ROUND, "until")
        seconds, micros = await client.time()
        return until_ms is not None and int(until_ms) <= seconds * 1000 + micros / 1000

    await until(is_open)
