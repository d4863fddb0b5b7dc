"""A soak's eyes on real things: processes that leak on purpose, a lease that nobody gives back, callers let down."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis.asyncio

from benchmarks.soak.crowd import MOST_AT_ONCE, Crowd, name_of
from benchmarks.soak.deeds import Deed
from benchmarks.soak.fleet import Fleet
from benchmarks.soak.record import Plan, Record, Rest
from benchmarks.soak.storage import Stock, breaches, take_stock
from benchmarks.soak.subjects import Sample, Watch
from benchmarks.soak.verdict import findings
from benchmarks.soak.visitor import Broken, Refused, Surprise, Visitor
from tests.support.stack import Stack
from tests.support.wire import Wire
from workers.protocol import keys

LOOKS, EVERY_S, MINUTE_S = 12, 0.05, 60.0
FAKES = {
    "memory": "kept.append(bytearray(b'x' * (1 << 20)))",
    "files": "kept.append(open('/dev/null'))",
    "children": "kept.append(subprocess.Popen(['sleep', '60']))",
    "nothing": "kept = [bytes(1 << 16)]",
}
"""What a process does fifty times a second."""


@contextmanager
def leaking(what: str) -> Iterator[int]:
    """Its process id, once it has begun."""
    loop = f"while True:\n    {FAKES[what]}\n    print(flush=True)\n    time.sleep(0.02)"
    program = f"import subprocess, time\nkept = []\n{loop}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        try:
            yield popen.pid
        finally:
            os.killpg(popen.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("memory", {"rss: what grows", "uss: what grows"}),
        ("files", {"fds: what grows"}),
        ("children", {"children_rss: what grows"}),
        ("nothing", set()),
    ],
)
def test_a_process_that_leaks_is_found(what: str, found: set[str]) -> None:
    """Looked at as a soak looks at a gateway; here a minute passes in a twentieth of a second."""
    record = Record(Plan(LOOKS * MINUTE_S, 1.0, 0))
    watch = Watch(record.subjects)
    with leaking(what) as pid:
        for number in range(LOOKS):
            watch.look(number * MINUTE_S, {"fake": pid}, {})
            time.sleep(EVERY_S)
        assert [line for line in watch.orphans() if "time.sleep" in line]
    samples = record.subjects["fake"].life.samples
    record.rests = [at_rest(sample, pid) for sample in samples]
    grown = {one.what for one in findings(record) if one.what.endswith("what grows") and not one.good}
    assert grown == found


def at_rest(sample: Sample, pid: int) -> Rest:
    return Rest(sample.at_s, 0.0, False, {}, {}, [], Stock(0.0, 0.0, {}, {}, {}), {"fake": sample}, {"fake": pid})


def test_who_ends_is_no_orphan() -> None:
    watch = Watch()
    with leaking("nothing") as pid:
        watch.look(0.0, {"fake": pid}, {})
        assert len(watch.orphans()) == 1
    assert watch.orphans() == []


async def test_a_lease_that_nobody_gives_back_is_found(client: redis.asyncio.Redis) -> None:
    calls, leases = keys.calls("m"), keys.worker_leases("m", "w")
    await client.hset(calls, "l1", "L 1 0 - 1.0 w boot1 g1 http://w:1\nteam")
    await client.zadd(leases, {"l1": 1})
    await client.hset("pd:keys", mapping={"a": 1, "b": 2})
    await client.set(keys.gateway("g"), 1, px=5000)
    try:
        stock = await take_stock(client, 3.0)
        assert stock.held() == {"pd:{}:calls": 1, "pd:{}:held:": 1}
        assert stock.lasting == {"pd:{}:calls": 1, "pd:{}:held:": 1, "pd:keys": 1}
        assert stock.families["pd:gateway:"] == 1
        assert stock.elements["pd:keys"] == 2
        assert (stock.at_s, stock.used_mib > 0) == (3.0, True)
        assert len(await breaches(client, ["m"])) == 1
    finally:
        await client.delete(calls, leases, "pd:keys", keys.gateway("g"))


async def answers(visitor: Visitor) -> None:
    """Nothing wrong."""


async def is_lost(visitor: Visitor) -> None:
    raise Refused(502, "worker_lost", "it died")


async def is_cut_off(visitor: Visitor) -> None:
    raise Broken("/v1/completions")


async def fails(visitor: Visitor) -> None:
    raise Refused(500, "internal_error", "see the log")


async def is_refused(visitor: Visitor) -> None:
    raise Refused(400, "unsupported_parameter", "no such thing")


async def is_wrong(visitor: Visitor) -> None:
    raise Surprise("200 in place of 401")


async def hangs(visitor: Visitor) -> None:
    raise TimeoutError


async def is_cut_by_redis(visitor: Visitor) -> None:
    raise OSError("connection to Redis reset")


async def is_odd(visitor: Visitor) -> None:
    raise IndexError("choices")


@pytest.mark.parametrize(
    ("deed", "ending"),
    [
        (answers, "ok"),
        (hangs, "surprise"),
        (is_cut_by_redis, "redis"),
        (is_odd, "surprise"),
        (is_lost, "worker_lost"),
        (is_cut_off, "broken"),
        (fails, "surprise"),
        (is_refused, "surprise"),
        (is_wrong, "surprise"),
    ],
)
async def test_trouble_is_told_from_failure(client: redis.asyncio.Redis, deed: Deed, ending: str) -> None:
    record = Record(Plan(0.1, 100.0, 0))
    fleet = Fleet(Stack(), client, Wire(("127.0.0.1", 1)), ("toy",), (1, 2))
    await Crowd(fleet, record, random.Random(0), {deed: 1}).visit(0.1)
    assert record.endings == {name_of(deed): {ending: record.num_deeds}}
    assert record.num_deeds > 0
    assert record.num_surprises == (record.num_deeds if ending == "surprise" else 0)
    assert bool(record.surprises) == (ending == "surprise")


async def test_the_machine_is_not_overrun(client: redis.asyncio.Redis) -> None:
    async def stays(visitor: Visitor) -> None:
        await asyncio.sleep(1.5)

    record = Record(Plan(0.1, 1000.0, 0))
    fleet = Fleet(Stack(), client, Wire(("127.0.0.1", 1)), ("toy",), (1, 2))
    await Crowd(fleet, record, random.Random(0), {stays: 1}).visit(1.0)
    assert record.num_deeds == MOST_AT_ONCE
    assert record.turned_away > 0
