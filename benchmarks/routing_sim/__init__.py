"""Placement in simulated time: ours and the usual ways, on public traces and on some made up here.

    python -m benchmarks routing_sim [--quick]

Ours is the gateway's own code over simulated workers, with its scripts on a real Redis (`paddock`); the others see the
true state of every worker at once. Without the public traces (`PADDOCK_TRACES`) only what is made up is simulated.
"""

from __future__ import annotations

import redis.asyncio
import uvloop

from benchmarks.routing_sim import fairness
from benchmarks.routing_sim.comparison import OURS, Figures, Fleet, compared, with_answers
from benchmarks.routing_sim.made_up import conversations, one_prefix
from benchmarks.routing_sim.traces import AZURE, FOLDER_VARIABLE, MOONCAKE, Trace, azure, mooncake, traces_folder
from benchmarks.table import Row
from gateway.store.client import connect
from tests.support.redis_server import RedisServer

LEAST_BUSY, HASHING, GREEDY = "least busy", "bounded-load hashing", "greedy cost"
COARSE = {LEAST_BUSY: 3.76, HASHING: 1.87, GREEDY: 1.01}
"""Mean TTFT, seconds, of the coarse model of the Mooncake trace that the bars were set by."""
AFFINE = (LEAST_BUSY, "pure prefix affinity", HASHING, GREEDY, OURS)


def measure(size: int, *, quick: bool = False) -> list[Row]:
    """`size`: rounds at 8 workers; larger fleets have one."""
    with RedisServer() as server:
        return uvloop.run(_measure(server.url, 1 if quick else size, quick))


async def _measure(url: str, rounds: int, quick: bool) -> list[Row]:
    async with connect(url) as client:
        rows: list[Row] = []
        base = conversations(100, 5)
        folder = traces_folder()
        if folder is None:
            rows.append(Row(f"public traces: not here, set {FOLDER_VARIABLE} to their folder", "skipped", "", "", True))
        else:
            base = mooncake(folder / MOONCAKE).first(500 if quick else 10_000)
            rows += await _traced(client, base, rounds, quick)
            for name, file in AZURE.items():
                trace = azure(folder / file, name).first(500 if quick else 4_000)
                rows += _beaten(trace.name, 8, await compared(client, trace, with_answers(8)))
        rows += await _shared(client, one_prefix(base))
        return rows + await fairness.measure(client, 120.0 if quick else 600.0)


async def _traced(client: redis.asyncio.Redis, trace: Trace, rounds: int, quick: bool) -> list[Row]:
    rows = _plain(await compared(client, trace, Fleet(8), rounds))
    if quick:
        return rows
    two = await compared(client, trace, Fleet(8), 1, [OURS], gateways=2)
    rows.append(_told("the same, two gateways (one round)", two[OURS]))
    rows += _beaten("prompts and answers", 8, await compared(client, trace, with_answers(8), rounds))
    for workers, end_s in ((64, 300.0), (1_000, 60.0)):
        fleet, full = Fleet(workers, end_s=end_s), with_answers(workers, end_s)
        rows += _beaten(f"prompts alone, {end_s:.0f} s", workers, await compared(client, trace, fleet, 1, AFFINE))
        rows += _beaten(f"prompts and answers, {end_s:.0f} s", workers, await compared(client, trace, full, 1, AFFINE))
    return rows


def _plain(found: dict[str, Figures]) -> list[Row]:
    """Prompts alone, at 8 workers: what has bars."""
    what = "8 workers, prompts alone"
    ours, least, hashing, greedy = (found[name].ttft_s for name in (OURS, LEAST_BUSY, HASHING, GREEDY))
    rows = [_told(f"{what}, {name}", figures) for name, figures in found.items()]
    for name, other, most in ((LEAST_BUSY, least, 0.27), (HASHING, hashing, 0.54), (GREEDY, greedy, 1.0)):
        reached = ours <= most * other if most < 1 else ours < other
        bar = f"<= {most:.2f}" if most < 1 else "< 1"
        rows.append(Row(f"{what}, ours / {name}", f"{ours:.3f} s / {other:.3f} s", f"{ours / other:.3f}", bar, reached))
        coarse = ours / COARSE[name]
        rows.append(Row(f"{what}, ours / {name} of the coarse model, {COARSE[name]} s", "", f"{coarse:.3f}", "", True))
    return rows


def _beaten(what: str, workers: int, found: dict[str, Figures]) -> list[Row]:
    """Ours is to be better than any of the usual ways in the same run. The greedy cost function is told beside them: it
    knows at once what ours hears of a moment later.
    """
    what = f"{workers:,} workers, {what}"
    rows = [_told(f"{what}, {name}", figures) for name, figures in found.items()]
    others = {name: figures.ttft_s for name, figures in found.items() if name not in (OURS, GREEDY)}
    best = min(others, key=lambda name: others[name])
    ratio, greedy = found[OURS].ttft_s / others[best], found[OURS].ttft_s / found[GREEDY].ttft_s
    rows.append(Row(f"{what}, ours / {best}", "", f"{ratio:.3f}", "< 1", ratio < 1))
    rows.append(Row(f"{what}, ours / {GREEDY} that knows all", "", f"{greedy:.3f}", "", True))
    return rows


async def _shared(client: redis.asyncio.Redis, trace: Trace) -> list[Row]:
    """Pure affinity sends all to the worker that had the prefix first."""
    what = "8 workers, prompts alone, one prefix for all"
    found = await compared(client, trace, Fleet(8))
    rows = [_told(f"{what}, {name}", figures) for name, figures in found.items()]
    busiest, ratio = found[OURS].busiest, found[OURS].ttft_s / found[LEAST_BUSY].ttft_s
    rows.append(Row(f"{what}, ours: busiest / mean", f"{busiest:.2f}", "", "<= 1.15", busiest <= 1.15))
    rows.append(Row(f"{what}, ours / least busy", "", f"{ratio:.2f}", "<= 0.70", ratio <= 0.7))
    return rows


def _told(what: str, figures: Figures) -> Row:
    return Row(what, str(figures), "", "", True)
