"""What people who look at the fleet cost a gateway: its processor time with ten of them at 100 workers that all work.

    python -m benchmarks.viewers_cost

The gateway has core 0 for itself; viewers, workers and Redis share core 1. The workers are one process: each has a
record that it writes twice a second, news five times a second with another load each time, and an event stream that
proves itself, but no model. So every row of the overview changes every second, which is the most that there can be to
tell. Rounds alternate between nobody and ten viewers of `GET /admin/events`, which read all that they are sent.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import msgspec
import redis.asyncio
from aiohttp import web

from accounts.protocol.records import digest
from benchmarks.load import cpu_seconds
from benchmarks.table import Row, print_rows
from tests.support.stack import Process, Stack
from workers.protocol import keys
from workers.protocol.control import CHALLENGE_HEADER, PROOF_HEADER, proof
from workers.protocol.framing import EVENTS_PATH, KEEP_ALIVE, KEEP_ALIVE_INTERVAL_S
from workers.protocol.heartbeat import FIELD, Heartbeat, Load, ModelFacts, News, record_of, sealed_news

WORKERS, MODELS, VIEWERS = 100, 10, 10
PHASE_S, SETTLE_S = 20.0, 4.0
NEWS_HZ = 5
BAR = 0.005
FACTS = ModelFacts(n_ctx_train=1 << 17, n_params=8_000_000_000, size=5 << 30, n_vocab=128_000)


def beat_of(number: int, port: int, chance: random.Random) -> Heartbeat:
    """The heartbeat of a busy worker."""
    busy = chance.randint(0, 8)
    load = Load(
        slots_busy=busy,
        kv_tokens_used=chance.randint(0, 1 << 17),
        backlog_tokens=chance.randint(0, 20_000),
        prefill_ms=chance.uniform(0.1, 0.2),
        decode_ms=chance.uniform(18.0, 22.0),
    )
    return Heartbeat(
        worker=f"worker-{number}",
        boot=f"boot-{number}",
        model=f"model-{number % MODELS}",
        address=f"http://127.0.0.1:{port}/{number}",
        slots=8,
        slots_busy=busy,
        n_ctx=1 << 16,
        kv_tokens=1 << 18,
        kv_tokens_used=load.kv_tokens_used,
        facts=FACTS,
        started_at=1.7e9,
        load=load,
        cache_ram_bytes=chance.randint(0, 8 << 30),
    )


class Workers:
    """100 workers without models."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def run(self, redis_url: str) -> None:
        app = web.Application()
        app.router.add_get("/{number}" + EVENTS_PATH, self._events)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = int(runner.addresses[0][1])
        client = redis.asyncio.Redis.from_url(redis_url)
        chance, versions, turn = random.Random(1), [0] * WORKERS, 0
        while True:
            turn += 1
            async with client.pipeline(transaction=False) as pipeline:
                for number in range(WORKERS):
                    beat = beat_of(number, port, chance)
                    versions[number] += 1
                    news = News(
                        model=beat.model, worker=beat.worker, boot=beat.boot, version=versions[number], load=beat.load
                    )
                    if turn % (NEWS_HZ // 2) == 1:
                        name = keys.worker(beat.model, beat.worker)
                        beat = msgspec.structs.replace(beat, version=versions[number])
                        pipeline.sadd(keys.MODELS, beat.model)
                        pipeline.sadd(keys.workers(beat.model), beat.worker)
                        pipeline.hset(name, mapping=record_of(beat, self._secret))
                        pipeline.pexpire(name, round(keys.HEARTBEAT_TTL_S * 1000))
                    pipeline.xadd(
                        keys.NEWS, {FIELD: sealed_news(news, self._secret)}, maxlen=keys.NEWS_KEPT, approximate=True
                    )
                await pipeline.execute()
            await asyncio.sleep(1 / NEWS_HZ)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """A worker's event stream, on which nothing happens."""
        number = request.match_info["number"]
        challenge = request.headers.get(CHALLENGE_HEADER, "")
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                PROOF_HEADER: proof(self._secret, f"worker-{number}", f"boot-{number}", challenge),
            }
        )
        await response.prepare(request)
        while True:
            await response.write(KEEP_ALIVE)
            await asyncio.sleep(KEEP_ALIVE_INTERVAL_S)


async def look(url: str, key: str) -> None:
    """Read what ten viewers are sent, until this process is ended."""

    async def one(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/admin/events") as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}, timeout=timeout) as first,
        # A key may have eight streams; the console's cookie counts for the same key, so a second one is taken.
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}-2"}, timeout=timeout) as second,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(VIEWERS):
            tasks.create_task(one(first if number % 2 else second))


@contextmanager
def viewers(gateway: Process, key: str) -> Iterator[None]:
    """Have ten viewers look while the block lasts."""
    command = [
        "taskset",
        "-c",
        "1",
        sys.executable,
        "-m",
        "benchmarks.viewers_cost",
        "--url",
        gateway.url,
        "--key",
        key,
    ]
    process = subprocess.Popen(command)
    try:
        time.sleep(SETTLE_S)
        if process.poll() is not None:
            raise RuntimeError("the viewers ended")
        yield
    finally:
        process.kill()
        process.wait()


def busy(gateway: Process) -> float:
    """The gateway's processor time in the next PHASE_S, as a share of one core."""
    before, began = cpu_seconds((gateway.pid,)), time.monotonic()
    time.sleep(PHASE_S)
    return (cpu_seconds((gateway.pid,)) - before) / (time.monotonic() - began)


def measure(rounds: int) -> list[Row]:
    alone, seen = list[float](), list[float]()
    with Stack(measured=True, cores={"gateway": "0", "workers": "1", "redis": "1"}) as stack:
        second = {"name": "second", "team": "ops", "sha256": digest(f"{stack.key}-2"), "admin": True}
        command = [sys.executable, "-m", "benchmarks.viewers_cost", "--secret", stack.secret]
        stack.spawn("workers", [*command, "--redis", stack.environment("worker")["PADDOCK_REDIS_URL"]], role="worker")
        gateway = stack.gateway(log_level="warning", api_keys=msgspec.json.encode([second]).decode())
        stack.wait_until_listed(gateway, *(f"model-{number}" for number in range(MODELS)))
        time.sleep(SETTLE_S)
        for _ in range(rounds):
            alone.append(busy(gateway))
            with viewers(gateway, stack.key):
                seen.append(busy(gateway))
    cost = statistics.median(with_them - without for with_them, without in zip(seen, alone, strict=True))
    return [
        Row(f"nobody looks, {WORKERS} workers", f"{statistics.median(alone):.2%} of a core", "", "", True),
        Row(
            f"{VIEWERS} viewers",
            f"{statistics.median(seen):.2%} of a core",
            f"{cost:+.2%} of a core",
            f"< {BAR:.1%} of a core",
            cost < BAR,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", default="", help="(for itself) look at the gateway of this address")
    parser.add_argument("--key", default="", help="(for itself) with this key")
    parser.add_argument("--redis", default="", help="(for itself) be the workers on this Redis")
    parser.add_argument("--secret", default="", help="(for itself) which hold this secret")
    given = parser.parse_args()
    if given.url:
        asyncio.run(look(given.url, given.key))
    elif given.redis:
        asyncio.run(Workers(given.secret).run(given.redis))
    else:
        print_rows("what people who look at the fleet cost a gateway", measure(given.rounds))


if __name__ == "__main__":
    main()
