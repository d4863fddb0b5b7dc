"""What limits cost a call, beside the counters of 1,000 teams and 100,000 keys.

The bar is what callers notice: the gateway's own time for a call with limits, over that for one without, paired calls
of one caller. The other rows are one process's limits alone, and the Redis beside it, on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import redis
import redis.asyncio
import uvloop

from accounts.protocol.records import Budget, Limits, PriceListRecord, digest
from benchmarks.table import Row
from gateway.call import Call, Principal, Subject
from gateway.limits.cost import Prices
from gateway.limits.limiter import RateLimits
from gateway.limits.sync import LimitSync
from gateway.routing.pool import Pool
from gateway.store.client import connect
from gateway.store.limits import LimitStore
from gateway.telemetry.request_log import RequestLog
from tests.support.pool import call as call_of
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from workers.protocol import keys
from workers.protocol.requests import GenerateRequest, Message

TEAMS, KEYS = 1_000, 100_000
CALLS = 4_000
PAIRS = 400
HIGH = 1_000_000_000
KEY_LIMITS = Limits(requests_per_minute=HIGH, tokens_per_minute=HIGH)
TEAM_LIMITS = Limits(
    requests_per_minute=HIGH, tokens_per_minute=HIGH, max_parallel=HIGH, budgets=(Budget(amount=1e6, period="month"),)
)
REQUEST = GenerateRequest(messages=(Message("user", "What is 3 plus 4?"),), max_tokens=16)
LIMITED, UNLIMITED = "pk-limited-0123456789abcdef", "pk-unlimited-0123456789abcdef"


class Directory:
    """No prices, and no limits of aliases."""

    prices = PriceListRecord()

    def alias(self, name: str) -> Subject | None:
        return None


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per call."""

    wall_us: float
    cpu_us: float
    redis_us: float

    def __str__(self) -> str:
        return f"{self.wall_us:.0f} µs, {self.cpu_us:.0f} µs of CPU, {self.redis_us:.0f} µs of Redis'"


def measure(rounds: int) -> list[Row]:
    """The best of so many rounds of each."""
    rows = uvloop.run(_alone(rounds))
    return [*rows, *_added(rounds)]


def principal(number: int) -> Principal:
    """The holder of key `number`, which has limits as its team has."""
    team = f"team-{number % TEAMS}"
    subjects = (Subject("team", team, TEAM_LIMITS), Subject("key", f"key-{number}", KEY_LIMITS))
    return Principal(f"key-{number}", team, None, admin=False, subjects=subjects)


async def fill(client: redis.asyncio.Redis) -> None:
    """Write counters as those that all teams and keys have in the middle of a month, each used in the last minute."""
    told: Any = await client.hget(keys.LIMITS_ROUND, "born")
    born = told.decode()
    tick = int(time.time() * 4)
    window = f"{born} 2 400 1 {tick - 50} 2 {tick - 10} 1 200"
    fields = {"w": window, "e1": f"{tick - 50} 1 200"}
    month = {"b:month:UTC": f"{int(time.time()) // 86400 * 86400} 123456789", "c": f"{born} 0"}
    names: list[tuple[str, dict[Any, Any]]] = [(f"team:team-{n}", {**fields, **month}) for n in range(TEAMS)]
    names += [(f"key:key-{n}", {**fields}) for n in range(KEYS)]
    for first in range(0, len(names), 2_000):
        async with client.pipeline(transaction=False) as pipeline:
            for name, values in names[first : first + 2_000]:
                pipeline.hset(keys.limits_subject(name), mapping=values)
            await pipeline.execute()


async def _alone(rounds: int) -> list[Row]:
    rows = []
    with RedisServer() as server:
        async with connect(server.url) as client:
            store = LimitStore(client, "bench", round_s=0.05)
            limits = RateLimits(store, Directory(), Prices(Directory()), lambda model: Pool())
            sync = LimitSync(limits, store)
            running = asyncio.create_task(sync.run())
            await asyncio.sleep(1.0)  # it begins, and reports
            await fill(client)
            holders = [principal(number) for number in range(CALLS)]
            for together in (1, 64):
                costs = [await _round(client, limits, holders, together) for _ in range(rounds)]
                cost = min(costs, key=lambda each: each.wall_us)
                what = f"reserve and settle, a key and its team, {together} at a time"
                rows.append(Row(what, str(cost), "", "", True))
            running.cancel()
    return rows


async def _round(client: redis.asyncio.Redis, limits: RateLimits, holders: Sequence[Principal], together: int) -> Cost:
    calls = [_call(holder) for holder in holders]
    redis_before = await _redis_cpu_s(client)

    async def caller(first: int) -> None:
        for call in calls[first::together]:
            async with limits.permit(call, (REQUEST,), RequestLog("id", "POST", "/")) as permit:
                await permit.granted()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller(first) for first in range(together)))
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    redis_s = await _redis_cpu_s(client) - redis_before
    return Cost(wall_s / CALLS * 1e6, cpu_s / CALLS * 1e6, redis_s / CALLS * 1e6)


def _call(holder: Principal) -> Call:
    made = call_of()
    return Call("request", holder, "m", "m", made.received_at, made.deadline, made.queue_deadline)


async def _redis_cpu_s(client: redis.asyncio.Redis) -> float:
    told = await client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def _added(rounds: int) -> list[Row]:
    with Stack(measured=True) as stack:
        stack.fake_worker("fake", "--step-ms", "1", "--tokens", "4")
        limits = json.loads(
            '{"requests_per_minute": 1000000000, "tokens_per_minute": 1000000000, "max_parallel": 1000000,'
            ' "budgets": [{"amount": 1000000}]}'
        )
        records = [
            {"name": "limited", "sha256": digest(LIMITED), "limits": limits},
            {"name": "unlimited", "sha256": digest(UNLIMITED)},
        ]
        gateway = stack.gateway(api_keys=json.dumps(records))
        stack.wait_until_listed(gateway, "fake")
        with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
            while client.hget(keys.LIMITS_ROUND, "until") is None:
                time.sleep(0.05)
        time.sleep(1.1)
        asyncio.run(_filled(stack.redis.url))
        found = [asyncio.run(_paired(gateway.url)) for _ in range(rounds)]
    limited, unlimited = min(found, key=lambda pair: pair[0] - pair[1])
    added = limited - unlimited
    return [
        Row("gateway's own time, a key without limits", f"p50 {unlimited:.2f} ms", "", "", True),
        Row("gateway's own time, a key with limits", f"p50 {limited:.2f} ms", "", "", True),
        Row("added by limits", f"p50 {added:.2f} ms", "", "<= 0.3 ms", added <= 0.3),
    ]


async def _filled(url: str) -> None:
    async with connect(url) as client:
        await fill(client)


async def _paired(url: str) -> tuple[float, float]:
    """Medians of the gateway's own time and the wait for a slot, in ms: with limits, without."""
    taken: dict[str, list[float]] = {LIMITED: [], UNLIMITED: []}
    body = {"model": "fake", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 2}
    async with aiohttp.ClientSession() as session:
        for number in range(2 * PAIRS + 20):
            key = (LIMITED, UNLIMITED)[number % 2]
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
                told = answer.headers
            if number >= 20:
                taken[key].append(float(told["x-paddock-overhead-ms"]) + float(told["x-paddock-queue-ms"]))
    return statistics.median(taken[LIMITED]), statistics.median(taken[UNLIMITED])
