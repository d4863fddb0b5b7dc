"""What placing costs: a ranking, keeping the picture of a large fleet, and a slot taken and given back in Redis.

    python -m benchmarks placement_cost

The fleet's picture is kept by a gateway's own code in a process of its own, from what another process writes into Redis
as a thousand workers would: records every half second and news with changed heads, 2,000 of them a second.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import msgspec
import psutil
import redis.asyncio
import uvloop

from benchmarks.table import Row
from gateway.admission.local_queue import RecentPlacements
from gateway.registry.fleet import Fleet
from gateway.routing.placement import PlacementRequest
from gateway.routing.pool import PoolUpdater
from gateway.routing.rank import rank
from gateway.store.client import Filed, Lease, Offer, Offers, Order, Store, connect
from tests.support.pool import SECRET, heartbeat
from tests.support.redis_server import RedisServer
from workers.protocol import keys
from workers.protocol.heartbeat import FIELD, Heartbeat, Load, News, pack_heads, record_of, sealed_news
from workers.protocol.prefixes import Prefix

MODEL = "m"
GATEWAY = "bench"
WORKERS, HEADS = 1_000, 2_000
BLOCKS = 64
"""Heads of the prompts that are ranked."""
TICKETS = 10_000
FOREVER_S = 1e6
RANK_P50_US = {1_000: 300.0, 10_000: 1_000.0}
NEWS_PER_S, CHANGED = 2_000, 4
"""Entries of all workers, and heads that come and that go with each."""
PUBLISHED_HZ = 20
SETTLE_S, FOLLOW_S = 5.0, 10.0
READY, GO = "bench:ready", "bench:go"


def measure(size: int) -> list[Row]:
    """`size`: thousands of rankings and of pairs."""
    rows = [row for workers in RANK_P50_US for row in _ranked(workers, size * 1_000)]
    with RedisServer() as server:
        rows += _followed(server.url)
    with RedisServer() as server:
        rows += uvloop.run(_stored(server.url, size * 1_000))
    return rows


def _load(chance: random.Random) -> Load:
    return Load(
        slots_busy=chance.randint(0, 8),
        backlog_tokens=chance.choice((0, 0, chance.randint(0, 20_000))),
        free_in_ms=chance.uniform(1.0, 4_000.0),
        prefill_ms=0.12,
        decode_ms=20.0,
        hold_ms=5_000.0,
        answer_tokens=400.0,
        bytes_per_token=4.0,
    )


def _beat(number: int, load: Load) -> Heartbeat:
    there = heartbeat(f"w{number}", slots=8)
    return msgspec.structs.replace(there, load=load, n_ctx=1 << 17, kv_tokens=1 << 24, slots_busy=load.slots_busy)


def _ranked(workers: int, calls: int) -> list[Row]:
    chance = random.Random(1)
    book = PoolUpdater()
    prompts: dict[str, Callable[[int], set[int]]] = {
        "cached nowhere": lambda number: set(),
        "a conversation of one worker": lambda number: set(range(BLOCKS)) if number == 5 else set(),
        "12 heads of all, 50 of one in fifty": lambda number: set(range(50 if number % 50 == 0 else 12)),
        "all heads of 200 workers": lambda number: set(range(BLOCKS)) if number % (workers // 200) == 0 else set(),
    }
    asks: dict[str, tuple[tuple[int, ...], Callable[[int], set[int]], PlacementRequest]] = {}
    for name, depths in prompts.items():
        digests = tuple(chance.getrandbits(64) for _ in range(BLOCKS))
        asks[name] = (
            digests,
            depths,
            PlacementRequest(Prefix(digests, tuple(range(1_024, 1_024 * (BLOCKS + 1), 1_024)), 70_000)),
        )
    for number in range(workers):
        heads = [digests[depth] for digests, depths, _ in asks.values() for depth in depths(number)]
        book.join(_beat(number, _load(chance)), heads)
    pool, recent = book.pool, RecentPlacements()
    rows = []
    for name, (_, _, request) in asks.items():
        times = []
        for turn in range(calls):
            start = time.perf_counter()
            rank(request, pool, recent, now=0.1, turn=turn)
            times.append((time.perf_counter() - start) * 1e6)
        p50, bar = median(times), RANK_P50_US[workers]
        figure = f"p50 {p50:.0f} us, p99 {sorted(times)[int(0.99 * len(times))]:.0f} us"
        rows.append(Row(f"rank, {workers:,} workers, {name}", figure, "", f"<= {bar:.0f} us", p50 <= bar))
    return rows


def _followed(url: str) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.placement_cost"]
    with subprocess.Popen([*command, "publish", url]) as publisher:
        try:
            done = subprocess.run([*command, "follow", url], check=True, capture_output=True, text=True)
        finally:
            publisher.terminate()
    found = json.loads(done.stdout)
    cpu, mib = found["cpu"], found["rss"] / 2**20
    what = f"picture of {found['workers']:,} workers with {found['heads']:,.0f} heads each"
    return [
        Row(f"{what}, {found['news']:.0f} news/s: CPU", f"{cpu:.1%} of a core", "", "<= 10 %", cpu <= 0.10),
        Row(f"{what}: memory of the process", f"{mib:.0f} MiB", "", "<= 286 MiB (300 MB)", mib * 2**20 <= 300e6),
    ]


async def _publish(url: str) -> None:
    """Until it is ended. News begin when the gateway has seen all workers."""
    chance = random.Random(2)
    async with connect(url) as client:
        workers = [_Published(number, chance) for number in range(WORKERS)]
        for worker in workers:
            await worker.join(client)
        await client.set(READY, 1)
        while not await client.exists(GO):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
        turn, next_at = 0, time.monotonic()
        while True:
            async with client.pipeline(transaction=False) as pipeline:
                for _ in range(NEWS_PER_S // PUBLISHED_HZ):
                    turn = (turn + 1) % WORKERS
                    workers[turn].tell(pipeline)
                await pipeline.execute()
            next_at += 1 / PUBLISHED_HZ
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))


class _Published:
    """One worker that exists in Redis only."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self._number = number
        self._chance = chance
        self._version = 0
        self._heads = {chance.getrandbits(64): 512 for _ in range(HEADS)}

    def _beat(self, load: Load) -> Heartbeat:
        return msgspec.structs.replace(_beat(self._number, load), version=self._version)

    async def join(self, client: redis.asyncio.Redis) -> None:
        beat = self._beat(_load(self._chance))
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.sadd(keys.MODELS, MODEL)
            pipeline.sadd(keys.workers(MODEL), beat.worker)
            pipeline.hset(keys.worker(MODEL, beat.worker), mapping=record_of(beat, SECRET))
            pipeline.set(keys.worker_heads(MODEL, beat.worker), pack_heads(0, self._heads))
            await pipeline.execute()

    def tell(self, pipeline: redis.asyncio.client.Pipeline) -> None:
        """A record and a news entry."""
        self._version += 1
        dropped = tuple(itertools.islice(self._heads, CHANGED))
        added = {self._chance.getrandbits(64): 512 for _ in range(CHANGED)}
        for head in dropped:
            del self._heads[head]
        self._heads.update(added)
        beat = self._beat(_load(self._chance))
        news = News(
            model=MODEL,
            worker=beat.worker,
            boot=beat.boot,
            version=self._version,
            load=beat.load,
            added=added,
            dropped=dropped,
        )
        pipeline.hset(keys.worker(MODEL, beat.worker), mapping=record_of(beat, SECRET))
        pipeline.xadd(keys.NEWS, {FIELD: sealed_news(news, SECRET)}, maxlen=keys.NEWS_KEPT, approximate=True)


async def _follow(url: str) -> None:
    """Prints what keeping the picture took."""
    async with connect(url) as client:
        while not await client.exists(READY):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        fleet = Fleet(client, SECRET)
        await fleet.refresh()
        task = asyncio.create_task(fleet.run())
        await client.set(GO, 1)
        await asyncio.sleep(SETTLE_S)
        cpu, wall, told = time.process_time(), time.monotonic(), _told(fleet)
        await asyncio.sleep(FOLLOW_S)
        cpu, wall, told = time.process_time() - cpu, time.monotonic() - wall, _told(fleet) - told
        heads = fleet.pool(MODEL).hashes
        found = {
            "cpu": cpu / wall,
            "rss": psutil.Process().memory_info().rss,
            "workers": len(fleet.snapshot.of(MODEL)),
            "news": told / wall,
            "heads": sum(heads.count(number) for number in range(WORKERS)) / WORKERS,
        }
        print(json.dumps(found))
        task.cancel()


def _told(fleet: Fleet) -> int:
    """News that have been heard of all workers."""
    return sum(there.beat.version for there in fleet.pool(MODEL).states.values())


async def _stored(url: str, pairs: int) -> list[Row]:
    async with connect(url) as client:
        minimal = await _minimal(client, pairs)
        rows = [Row("the least that a pair could be: two small scripts", str(minimal), "", "", True)]
        for queued in (0, TICKETS):
            bench = _Pairs(client, queued)
            await bench.fill()
            taken = await bench.measure(pairs)
            what = f"acquire + release, {WORKERS:,} workers, {queued:,} queued tickets"
            rows += [
                Row(f"{what}: one at a time", f"p50 {taken.p50_ms:.3f} ms", "", "<= 0.3 ms", taken.p50_ms <= 0.3),
                Row(
                    f"{what}: pairs per second of Redis' CPU",
                    f"{taken.pairs_per_cpu_s:,.0f}",
                    f"{minimal.pairs_per_cpu_s / taken.pairs_per_cpu_s:.1f} x the least",
                    ">= 10,000",
                    taken.pairs_per_cpu_s >= 10_000,
                ),
            ]
        return rows


@dataclass(frozen=True, slots=True)
class PairCost:
    p50_ms: float
    redis_us: float
    """CPU of Redis for one pair."""

    @property
    def pairs_per_cpu_s(self) -> float:
        return 1e6 / self.redis_us

    def __str__(self) -> str:
        return f"p50 {self.p50_ms * 1e3:.0f} us, {self.redis_us:.0f} us of Redis' CPU"


async def _cpu_s(client: redis.asyncio.Redis) -> float:
    found = await client.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


async def _minimal(client: redis.asyncio.Redis, pairs: int) -> PairCost:
    take = await client.script_load(
        "local w = redis.call('ZPOPMIN', KEYS[1]) redis.call('HSET', KEYS[2], ARGV[1], w[1]) return w[1]"
    )
    give = await client.script_load(
        "local w = redis.call('HGET', KEYS[2], ARGV[1]) redis.call('HDEL', KEYS[2], ARGV[1]) "
        "redis.call('ZADD', KEYS[1], 0, w) return w"
    )
    await client.zadd("{b}free", {f"w{number}": 0 for number in range(WORKERS)})
    times, cpu = [], await _cpu_s(client)
    for number in range(pairs):
        start = time.perf_counter()
        await client.evalsha(take, 2, "{b}free", "{b}leases", f"c{number}")
        await client.evalsha(give, 2, "{b}free", "{b}leases", f"c{number}")
        times.append((time.perf_counter() - start) * 1e3)
    return PairCost(median(times), (await _cpu_s(client) - cpu) / pairs * 1e6)


class _Pairs:
    """A line of constant length: each pair files a ticket and gives a slot back, which a ticket before it gets."""

    def __init__(self, client: redis.asyncio.Redis, queued: int) -> None:
        self._client = client
        self._store = Store(client, lease_ttl_s=FOREVER_S, grant_ttl_s=FOREVER_S)
        self._queued = queued
        self._chance = random.Random(3)
        self._ids = itertools.count()
        self._held: list[Lease] = []
        self._offers: dict[str, Offers] = {}
        self._grants = client.pubsub()

    async def fill(self) -> None:
        await self._client.flushall()
        async with self._client.pipeline(transaction=False) as pipeline:
            for number in range(WORKERS):
                beat = _beat(number, Load())
                pipeline.sadd(keys.workers(MODEL), beat.worker)
                pipeline.hset(keys.worker(MODEL, beat.worker), mapping=record_of(beat, SECRET))
            await pipeline.execute()
        await self._grants.subscribe(keys.grants_channel(GATEWAY))
        await self._grants.get_message(timeout=5.0)
        # Where nobody is to wait one slot in two stays free.
        for _ in range(8 if self._queued else 4):
            for number in range(WORKERS):
                await self._ask((f"w{number}",))
        for _ in range(self._queued):
            await self._ask()

    async def measure(self, pairs: int) -> PairCost:
        cpu_us, times = 0.0, []
        for _ in range(pairs // 100):
            before = await _cpu_s(self._client)
            for _ in range(100):
                start = time.perf_counter()
                await self._ask()
                await self._store.release(GATEWAY, self._held.pop(self._chance.randrange(len(self._held))))
                times.append((time.perf_counter() - start) * 1e3)
            cpu_us += (await _cpu_s(self._client) - before) * 1e6
            await self._claim()
        await self._grants.aclose()  # type: ignore[no-untyped-call]
        return PairCost(median(times), cpu_us / len(times))

    async def _ask(self, workers: tuple[str, ...] = ()) -> None:
        id = f"c{next(self._ids)}"
        offers = self._offers[id] = self._some(workers)
        order = Order(id, f"team{self._chance.randrange(8)}", self._chance.uniform(100.0, 9_000.0))
        answer = await self._store.acquire(
            GATEWAY, MODEL, order, offers, ticket_ttl_s=FOREVER_S, max_queue=10**6, max_team_queue=10**6
        )
        if isinstance(answer, Lease):
            self._held.append(answer)
        else:
            assert isinstance(answer, Filed)

    def _some(self, workers: tuple[str, ...]) -> Offers:
        """Eight workers, of which three are taken at once, and any other."""
        named = workers or tuple(f"w{number}" for number in self._chance.sample(range(WORKERS), 8))
        cost = self._chance.uniform(10.0, 1_000.0)
        offers = tuple(
            Offer(name, cost * (1 + 0.1 * at), 2 * cost + 500.0, 1_000, cost * (1 + 0.1 * at))
            for at, name in enumerate(named)
        )
        elsewhere = None if workers else Offer("", 1.5 * cost, 3 * cost, 1_500, 1.5 * cost)
        return Offers(take=offers[:3], more=offers[3:], elsewhere=elsewhere, hold_ms=2_000.0)

    async def _claim(self) -> None:
        """What was granted since, outside of what is measured."""
        await self._grants.ping("over")
        while (message := await self._grants.get_message(timeout=5.0)) is not None and message["type"] != "pong":
            id = message["data"].decode()
            lease = await self._store.claim(GATEWAY, MODEL, id, self._offers.pop(id))
            if lease is not None:
                self._held.append(lease)


if __name__ == "__main__":
    part, url = sys.argv[1:]
    asyncio.run({"publish": _publish, "follow": _follow}[part](url))
