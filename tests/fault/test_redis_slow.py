"""The way to Redis is slow or cut, for all or for workers only: whoever lives stays in the fleet, and calls go on."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.store.client import ANSWER_TIMEOUT_S
from tests.fault.book import Book, Record, keeping_book
from tests.fault.rest import at_rest
from tests.support.redis_server import RedisServer
from tests.support.stack import Process, Stack, free_port
from tests.support.waiting import until
from tests.support.wire import Wire, open_wire
from workers.protocol import keys
from workers.service.registration.heartbeat import REDIS_TIMEOUT_S

MODEL = "pool"
CALLERS, TOKENS = 8, 20
SLOW_S = keys.HEARTBEAT_TTL_S + 3.0
"""Long enough for every record to expire that nobody renews."""
FLAGS = ("--step-ms", "20", "--tokens", "5000")
TRUE_ERRORS = {"store_unavailable", "queue_timeout", "queue_full"}
"""What may be said of a Redis that is as slow as anybody waits for."""
NAMED = "lives and does not renew its record in Redis"


@asynccontextmanager
async def fleet(*, workers_only: bool) -> AsyncIterator[tuple[Stack, Wire, Book]]:
    """Two workers and two gateways; a wire lies before Redis for all, or for the workers only."""
    server = RedisServer(port=free_port())
    with server:
        async with open_wire(server.port) as wire:
            direct, wired = f"redis://127.0.0.1:{server.port}", f"redis://127.0.0.1:{wire.port}"
            with Stack(site=wired, redis=server) as stack:
                for name in ("fake-0", "fake-1"):
                    tally = ("--tally", str(stack.folder / f"{name}.tally"))
                    stack.fake_worker(MODEL, *FLAGS, *tally, slots=4, wait=False, worker_id=name)
                stack.site = direct if workers_only else wired
                for _ in range(2):
                    stack.gateway(wait=False, queue_timeout_s=10)
                for gateway in stack.gateways:
                    await asyncio.to_thread(stack.wait_until_ready, gateway)
                await until(lambda: all(has_workers(gateway) for gateway in stack.gateways), 10, "both are known")
                async with keeping_book(stack.key) as book:
                    yield stack, wire, book


def has_workers(gateway: Process) -> bool:
    return metric(gateway, f'paddock_workers{{model="{MODEL}"}}') == 2


def metric(gateway: Process, name: str) -> float:
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


async def call_for(book: Book, gateways: Iterable[Process], seconds: float) -> list[Record]:
    """What callers of both gateways got who asked again and again for so long."""
    ends, records = time.monotonic() + seconds, list[Record]()

    async def caller(gateway: Process) -> None:
        while time.monotonic() < ends:
            record = book.ask(gateway, MODEL, TOKENS)
            records.append(record)
            await record.end()
            if not record.answered:
                await asyncio.sleep(0.2)

    await asyncio.gather(*(caller(gateway) for gateway in gateways for _ in range(CALLERS // 2)))
    return records


async def watch(book: Book, gateways: Iterable[Process], wrong: list[str]) -> None:
    """Notes what gateways say of the fleet that isn't true."""

    async def look(gateway: Process) -> None:
        async with book.session.get(f"{gateway.url}/ready") as response:
            said: Any = await response.json()
            if "no worker is registered" in str(said) or (response.status == 200 and said["workers"] != 2):
                wrong.append(f"/ready: {said}")
        async with book.session.get(f"{gateway.url}/v1/models") as response:
            listed = [one["id"] for one in (await response.json())["data"]]
            if listed != [MODEL]:
                wrong.append(f"/v1/models: {listed}")

    while True:
        await asyncio.gather(*(look(gateway) for gateway in gateways))
        await asyncio.sleep(0.3)


async def strike(stack: Stack, book: Book, seconds: float = SLOW_S) -> Counter[str]:
    """What callers got meanwhile, by its ending, and that nothing false was said of the fleet."""
    wrong = list[str]()
    watching = asyncio.create_task(watch(book, stack.gateways, wrong))
    records = await call_for(book, stack.gateways, seconds)
    watching.cancel()
    await asyncio.wait([watching])
    assert not wrong, wrong[:3]
    return Counter(record.ending for record in records)


async def recovered(stack: Stack, book: Book) -> None:
    """All is as before: every call is answered, by Redis again, and nothing is left of any."""
    for gateway in stack.gateways:
        await until(lambda g=gateway: not metric(g, "paddock_without_redis{"), 10, "Redis places calls")  # type: ignore[misc]
    records = await call_for(book, stack.gateways, 1.0)
    assert {record.ending for record in records} == {"answered"}
    await at_rest(stack, MODEL, within_s=8, url=f"redis://127.0.0.1:{stack.redis.port}")
    assert stack.leases(MODEL) == 0
    tallies = [stack.folder / f"{worker.name}.tally" for worker in stack.workers]
    print(book.check(stack.gateways, tallies, frozenset()))
    for process in stack.processes:
        assert process.popen.poll() is None
        assert "Traceback" not in process.text()


def test_a_beat_of_two_slow_round_trips_renews_in_time() -> None:
    """Workers wait for Redis no less than gateways do, and a record outlives a beat that takes as long as that."""
    assert REDIS_TIMEOUT_S >= ANSWER_TIMEOUT_S
    assert 2 * REDIS_TIMEOUT_S + keys.HEARTBEAT_INTERVAL_S < keys.HEARTBEAT_TTL_S


@pytest.mark.long
@pytest.mark.parametrize("round_trip_s", [0.6, 1.1, 1.9])
async def test_slow_for_all(round_trip_s: float) -> None:
    """Calls begin later by what a round trip takes, and no worker loses its record."""
    async with fleet(workers_only=False) as (stack, wire, book):
        wire.delay_s = round_trip_s / 2
        endings = await strike(stack, book)
        print(f"\nround trip of {round_trip_s:g} s: {dict(endings)}")
        assert endings["answered"] >= CALLERS
        assert endings.keys() <= {"answered", *(TRUE_ERRORS if round_trip_s > 1.5 else ())}
        wire.delay_s = 0.0
        await recovered(stack, book)


@pytest.mark.long
@pytest.mark.parametrize("round_trip_s", [1.1, 3.0])
async def test_slow_for_the_workers_only(round_trip_s: float) -> None:
    """Beyond what a worker waits for, gateways renew its record in its place."""
    async with fleet(workers_only=True) as (stack, wire, book):
        wire.delay_s = round_trip_s / 2
        endings = await strike(stack, book)
        print(f"\nworkers' round trip of {round_trip_s:g} s: {dict(endings)}")
        assert endings.keys() == {"answered"}
        if round_trip_s < REDIS_TIMEOUT_S:
            assert not any(NAMED in gateway.text() for gateway in stack.gateways)
        wire.delay_s = 0.0
        await recovered(stack, book)


async def test_cut_for_the_workers_only() -> None:
    """A gateway renews their records in their place, and says so once of each."""
    async with fleet(workers_only=True) as (stack, wire, book):
        wire.stall()
        endings = await strike(stack, book)
        assert endings.keys() == {"answered"}
        for worker in stack.workers:
            assert stack.heartbeat(MODEL, worker.name) is not None
            said = [
                gateway.text().count(f"worker {worker.name} of model {MODEL} {NAMED}") for gateway in stack.gateways
            ]
            assert max(said) == 1, "to the other gateway, the record is not late then"
        wire.cut()
        wire.go_on()
        await recovered(stack, book)


@pytest.mark.long
async def test_cut_for_the_workers_only_and_one_ends() -> None:
    """Whoever is heard stays; whoever ends is gone at once, with or without a word to Redis."""
    async with fleet(workers_only=True) as (stack, wire, book):
        wire.stall()
        await strike(stack, book)
        killed, stopped = stack.workers
        killed.kill()
        await asyncio.sleep(0.3)
        records = await call_for(book, stack.gateways, 1.0)
        assert {record.ending for record in records} == {"answered"}, "the dead one gets no calls"
        within_s = keys.HEARTBEAT_TTL_S + 2
        took_s = await until(lambda: stack.heartbeat(MODEL, killed.name) is None, within_s, "its record expires")
        print(f"\nthe record of a killed worker is gone after {took_s:.1f} s")
        stopped.signal(signal.SIGTERM)
        await until(lambda: stack.heartbeat(MODEL, stopped.name) is None, within_s + 5, "that of the other one, too")
        for gateway in stack.gateways:
            await until(lambda g=gateway: metric(g, "paddock_workers{") == 0, 3, "nobody is left")  # type: ignore[misc]
