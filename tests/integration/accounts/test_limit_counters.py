"""Counters of days, months and budgets in a real Redis are never lower than the ledger, and never fall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from prometheus_client import CollectorRegistry

from accounts.budgets import limit_counters as module
from accounts.budgets.limit_counters import LimitCounters
from accounts.budgets.watch import BudgetWatch
from accounts.database.database import Database
from accounts.metrics import Metrics
from accounts.protocol.limit_counters import subject_name
from accounts.protocol.periods import span_at
from tests.support.redis_server import RedisServer
from tests.support.usage_rows import make_key, make_subject, record, write
from workers.protocol import keys
from workers.redis.link import connect

UNIT = 1_000_000_000


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """An operator's, for what a test looks at."""
    made = redis.asyncio.Redis.from_url(server.url)
    yield made
    await made.aclose()


@pytest.fixture
async def own(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """The service's, with the rights of gateways."""
    made = connect(server.url_of("gateway"), timeout_s=5.0, retries=0)
    yield made
    await made.aclose()


@pytest.fixture
def counters(database: Database, own: redis.asyncio.Redis) -> LimitCounters:
    return LimitCounters(database, own, Metrics(CollectorRegistry()))


async def counted(client: redis.asyncio.Redis, subject: str) -> dict[str, str]:
    fields: Any = await client.hgetall(keys.limits_subject(subject))
    return {name.decode(): value.decode() for name, value in fields.items()}


async def lose(client: redis.asyncio.Redis, born: str) -> None:
    """Redis loses everything, and gateways begin anew, as `lua/limits_begin.lua` does."""
    for name in await client.keys("{pd:limits}:*"):
        await client.delete(name)
    await client.hset(keys.LIMITS_ROUND, "born", born)


async def test_what_redis_lost_is_taken_from_the_ledger(
    database: Database, client: redis.asyncio.Redis, counters: LimitCounters
) -> None:
    now = time.time()
    make_subject(
        database,
        "team",
        "red",
        limits={"tokens_per_day": 1000, "budgets": [{"amount": 5, "period": "week", "time_zone": "Asia/Kolkata"}]},
    )
    make_subject(database, "team", "blue", limits={"requests_per_minute": 5})
    make_key(database, "ci", "red", limits={"tokens_per_month": 10_000})
    write(database, [record(1, ended_at=now, cost_nano=2 * UNIT), record(2, ended_at=now, team="blue")])
    assert await counters.look() == 3
    day, month = (span_at(period, "UTC", now).begins_at for period in ("day", "month"))
    week = span_at("week", "Asia/Kolkata", now).begins_at
    assert await counted(client, "team:red") == {"d": f"{day} 110", "b:week:Asia/Kolkata": f"{week} {2 * UNIT}"}
    assert await counted(client, "key:ci") == {"m": f"{month} 220"}
    assert await counted(client, "team:blue") == {}
    assert 0 < await client.ttl(keys.limits_subject("team:red")) <= 40 * 86_400
    assert await counters.look() == 0, "nothing has changed"
    await lose(client, "1795000000000001")
    assert await counters.look() == 3
    assert (await counted(client, "team:red"))["d"] == f"{day} 110"


async def test_counters_only_rise(database: Database, client: redis.asyncio.Redis, counters: LimitCounters) -> None:
    now = time.time()
    day = span_at("day", "UTC", now).begins_at
    make_subject(database, "team", "red", limits={"tokens_per_day": 1000})
    write(database, [record(1, ended_at=now)])
    name = keys.limits_subject("team:red")
    for before, after in (
        (f"{day} 5000", f"{day} 5000"),  # calls that run, or are not written yet
        (f"{day} 50", f"{day} 110"),
        (f"{day - 86_400} 5000", f"{day} 110"),
        (f"{day + 86_400} 7", f"{day + 86_400} 7"),  # a gateway's clock is ahead
        ("nonsense", f"{day} 110"),
    ):
        await lose(client, before)
        await client.hset(name, "d", before)
        await counters.look()
        assert (await counted(client, "team:red"))["d"] == after, before


async def test_a_limit_that_is_new_counts_what_was_used_before(
    database: Database, client: redis.asyncio.Redis, counters: LimitCounters
) -> None:
    now = time.time()
    write(database, [record(1, ended_at=now, user="ann|%x", cost_nano=UNIT)])
    assert await counters.look() == 0
    make_subject(database, "user", "ann@x", limits={"tokens_per_day": 5})
    make_subject(database, "alias", "chat", limits={"budgets": [{"amount": 3.0}]})
    assert await counters.look() == 1
    month = span_at("month", "UTC", now).begins_at
    assert await counted(client, "alias:chat") == {"b:month:UTC": f"{month} {UNIT}"}
    assert subject_name("user", "ann|%x") == "user:ann%7C%25x"


async def test_many_subjects_are_raised_in_pieces(
    database: Database, client: redis.asyncio.Redis, counters: LimitCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FLOORS", 7)
    monkeypatch.setattr(module, "MAX_NAMES", 5)
    now = time.time()
    for number in range(20):
        make_subject(database, "team", f"team-{number}", limits={"tokens_per_day": 1000})
    write(database, [record(n + 1, ended_at=now, team=f"team-{n}") for n in range(20)])
    assert await counters.look() == 20
    assert len(await client.keys("{pd:limits}:of:*")) == 20


async def test_metrics_tell_budgets_over_their_thresholds(database: Database, own: redis.asyncio.Redis) -> None:
    metrics = Metrics(CollectorRegistry())
    counters = LimitCounters(database, own, metrics)
    now = time.time()
    make_subject(database, "team", "red", limits={"budgets": [{"amount": 10.0}]})
    make_subject(database, "team", "blue", limits={"budgets": [{"amount": 10.0}]})
    calls = [record(1, ended_at=now, cost_nano=9 * UNIT), record(2, ended_at=now, team="blue", cost_nano=11 * UNIT)]
    write(database, calls, BudgetWatch(metrics, has_webhook=False))
    await counters.look()
    assert (metrics.budgets_warned._number, metrics.budgets_spent._number) == (2, 1)


async def test_a_redis_that_is_away_is_waited_for(counters: LimitCounters, server: RedisServer) -> None:
    server.kill()
    with pytest.raises((redis.RedisError, OSError)):
        await counters.look()
    server.start()
    running = asyncio.create_task(counters.run())
    async with asyncio.timeout(20):
        while counters._born == b"":  # noqa: ASYNC110 - until it has looked
            await asyncio.sleep(0.05)
    running.cancel()
