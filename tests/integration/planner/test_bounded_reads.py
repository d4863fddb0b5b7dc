"""What others may have written where supervisors read: fields without number or of any length. The rest is read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import redis.asyncio

from tests.support.redis_server import RedisServer
from tests.unit.workers.planner.reports import report
from workers.planner.bounded_reads import AGAIN_S, LONGEST_ANSWER, MAX_PAUSE_S, MOST_FIELDS, BoundedReads
from workers.planner.exchange import Exchange
from workers.planner.hearing import Hearing
from workers.planner.messages import encode as encode_report
from workers.protocol import keys, residency
from workers.protocol.heartbeat import BEAT
from workers.protocol.residency import LONGEST_TOLD, GatewayDemand, ModelDemand, decode_demand
from workers.redis import link

MIB = 1 << 20
MEMORY_BYTES = 3 * LONGEST_ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def supervisor(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """A client as a supervisor has it, with its login."""
    url = server.url_of("supervisor")
    async with link.connect(url, timeout_s=2.0, retries=0, longest_bytes=LONGEST_ANSWER) as connected:
        yield connected


@pytest.fixture
async def rogue(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with link.connect(server.url, timeout_s=10.0, retries=0) as connected:
        yield connected
        await connected.flushall()


def told(at: float) -> bytes:
    return residency.encode(GatewayDemand(at=at, models={"m": ModelDemand(num_waiting=1, oldest_at=at)}))


async def heard(exchange: Exchange, rogue: redis.asyncio.Redis, looks: int = 5) -> dict[bytes, bytes]:
    """What the last of some looks has of gateways, while a true one tells again and again."""
    demand: dict[bytes, bytes] = {}
    for _ in range(looks):
        await rogue.hset(keys.DEMAND, "true", told(time.time()))
        look = await exchange.look({"w": "m"})
        demand = dict(look.demand) if look is not None else demand
        await asyncio.sleep(0.2)
    return demand


async def test_one_long_field_is_left_out_and_named_and_costs_no_memory(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await rogue.hset(keys.DEMAND, "huge", b"x" * (100 * MIB))
    await rogue.hset(keys.ORDERS, "host1", b"x" * (100 * MIB))
    await rogue.hset(keys.worker("m", "w"), BEAT, b"x" * (100 * MIB))
    exchange = Exchange(supervisor, "host1")
    process = psutil.Process()
    before, most, is_over = process.memory_info().rss, 0, False

    async def watch() -> None:
        nonlocal most
        while not is_over:
            most = max(most, process.memory_info().rss - before)
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    with caplog.at_level(logging.WARNING):
        demand = await heard(exchange, rogue)
    is_over = True
    await watching
    assert set(demand) == {b"true"}
    assert decode_demand(demand[b"true"]).models["m"].num_waiting == 1
    assert most < MEMORY_BYTES, f"{most:,}"
    for name in (f"{keys.DEMAND}, field huge", f"{keys.ORDERS}, field host1", f"{keys.worker('m', 'w')}, field beat"):
        assert sum(name in line and "it has 104,857,600 bytes" in line for line in caplog.messages) == 1, name
    await rogue.hdel(keys.DEMAND, "huge")


async def test_fields_without_number_leave_those_that_were_known(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = Exchange(supervisor, "host1")
    assert set(await heard(exchange, rogue, looks=1)) == {b"true"}
    for begin in range(0, 100_000, 10_000):
        await rogue.hset(keys.DEMAND, mapping={f"false-{begin + n}": told(time.time()) for n in range(10_000)})
    began = time.monotonic()
    demand = await heard(exchange, rogue)
    print(f"\n5 looks among 100,000 fields took {time.monotonic() - began - 1.0:.2f} s")
    assert b"true" in demand
    assert len(demand) == MOST_FIELDS
    assert any(f"{keys.DEMAND}, field one of many, is left out" in line for line in caplog.messages)
    hearing = Hearing(decode_demand)
    # As read at once: on a busy machine the look before this one may have been a second ago, and a first message is
    # one of a sender that is alive only while it is that fresh.
    hearing.take(demand, decode_demand(demand[b"true"]).at, time.monotonic())
    assert "true" in hearing.live(time.monotonic())


async def write_long_names(rogue: redis.asyncio.Redis, name: str, form: str) -> None:
    """Write fields whose names are longer together than an answer may be."""
    if form == "one name":
        await rogue.hset(name, b"x" * (LONGEST_ANSWER + MIB), "")
        return
    for begin in range(0, 48, 8):
        await rogue.hset(name, mapping={b"%d" % n + b"x" * (MIB // 2): "" for n in range(begin, begin + 8)})


@pytest.mark.parametrize("form", ["one name", "many names"])
async def test_names_of_any_length_keep_no_supervisor_from_deciding(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    exchange, now = Exchange(supervisor, "host1"), time.time()
    await rogue.hset(keys.ASKED, "m", str(now))
    assert set(await heard(exchange, rogue, looks=1)) == {b"true"}
    for name in (keys.DEMAND, keys.ASKED, keys.MACHINES):
        await write_long_names(rogue, name, form)
    assert set(await heard(exchange, rogue)) == {b"true"}
    look = await exchange.look({})
    assert look is not None
    assert dict(look.asked) == {"m": pytest.approx(now)}, "it is told once only, and was known"
    assert await rogue.hkeys(keys.DEMAND) == [b"true"]
    assert sum(f"more than {LONGEST_ANSWER:,} bytes" in line for line in caplog.messages) == 3
    # One that is started then knows of none; a gateway that is new is heard of all the same.
    await write_long_names(rogue, keys.DEMAND, form)
    assert set(await heard(Exchange(supervisor, "host2"), rogue)) == {b"true"}


async def calls_of(rogue: redis.asyncio.Redis, command: str) -> int:
    """How often Redis has run a command since `config_resetstat`."""
    return int((await rogue.info("commandstats")).get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_long_names_without_pause_have_no_hash_rewritten_without_pause(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis
) -> None:
    """Each of them made every supervisor read 20 MiB and write the hash anew, twice a second."""
    exchange, looks = Exchange(supervisor, "host1"), 25
    assert set(await heard(exchange, rogue, looks=1)) == {b"true"}
    await rogue.config_resetstat()
    num_written, began = 0, time.monotonic()

    async def attack() -> None:
        nonlocal num_written
        while True:
            await write_long_names(rogue, keys.DEMAND, "one name")
            num_written += 1
            await asyncio.sleep(0.1)

    attacking = asyncio.create_task(attack())
    heard_at, oldest_s = time.time(), 0.0
    for _ in range(looks):
        if true := (await heard(exchange, rogue, looks=1)).get(b"true"):
            heard_at = decode_demand(true).at
        oldest_s = max(oldest_s, time.time() - heard_at)
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    took_s, num_rewritten = time.monotonic() - began, await calls_of(rogue, "unlink")
    print(f"\n{num_written} long names in {took_s:.1f} s: rewritten {num_rewritten} times, heard {oldest_s:.2f} s ago")
    assert 1 <= num_rewritten <= 1 + took_s / 1.5, "after 0, 0.5, 1.5, 3.5, 7.5 s, then every 8 s"
    assert num_written > 2 * num_rewritten
    assert oldest_s < 2 * AGAIN_S + 0.5, "a gateway that is known is heard all the while"
    await rogue.hdel(keys.DEMAND, b"x" * (LONGEST_ANSWER + MIB))
    await rogue.hset(keys.DEMAND, "new", told(time.time()))
    began = time.monotonic()
    while set(await heard(exchange, rogue, looks=1)) != {b"true", b"new"}:
        assert time.monotonic() - began < MAX_PAUSE_S + 1.0, "one that is new is heard once the names are read"


async def test_names_without_number_are_not_read_without_pause(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand names, written once, were read twice a second by every supervisor, for ever."""
    exchange, looks, num_read, read_names = Exchange(supervisor, "host1"), 25, 0, BoundedReads._names

    async def counted(reads: BoundedReads, name: str) -> list[bytes] | None:
        nonlocal num_read
        num_read += name == keys.DEMAND
        return await read_names(reads, name)

    monkeypatch.setattr(BoundedReads, "_names", counted)
    assert set(await heard(exchange, rogue, looks=1)) == {b"true"}
    for begin in range(0, 100_000, 10_000):
        await rogue.hset(keys.DEMAND, mapping={f"false-{begin + n}": "" for n in range(10_000)})
    began = time.monotonic()
    assert b"true" in await heard(exchange, rogue, looks=looks)
    assert 1 <= num_read <= 1 + (time.monotonic() - began) / 1.5, "after 0, 0.5, 1.5, 3.5, 7.5 s, then every 8 s"


async def test_machines_beside_a_long_one_are_read_also_at_the_start(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis
) -> None:
    at = time.time()  # of the message and of the looks, which on a busy machine are seconds apart
    await rogue.hset(keys.MACHINES, "host2", encode_report(report(at)))
    await rogue.hset(keys.MACHINES, "huge", b"x" * (LONGEST_TOLD + 1))
    await rogue.hset(keys.MACHINES, "x" * 1000, b"{}")
    assert await Exchange(supervisor, "host1").others_at_start(at) == frozenset({"host2"})
    await rogue.hset(keys.MACHINES, "huge", b"x" * (2 * LONGEST_ANSWER))
    exchange = Exchange(supervisor, "host1")
    assert await exchange.others_at_start(at) is None, "as if Redis did not answer: it is asked again"
    assert await exchange.others_at_start(at) == frozenset({"host2"})


async def test_nothing_is_asked_twice_where_all_is_short(
    supervisor: redis.asyncio.Redis, rogue: redis.asyncio.Redis
) -> None:
    exchange = Exchange(supervisor, "host1")
    await heard(exchange, rogue, looks=2)
    await rogue.config_resetstat()
    await heard(exchange, rogue, looks=3)
    called = await rogue.info("commandstats")
    assert called["cmdstat_hgetall"]["calls"] == 9
    assert "cmdstat_hstrlen" not in called
