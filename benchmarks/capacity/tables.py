"""The tables of docs/capacity.md, worked out of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.capacity import rows_of
from benchmarks.capacity.costs import Costs
from benchmarks.capacity.sizing import (
    GATEWAY_CPU,
    REDIS_CPU,
    Demand,
    Fleet,
    Worker,
    fewest_gateways,
    loop_wait,
    plan,
)
from benchmarks.capacity.trial import Trial

MEASURED = Path(__file__).with_name("measured.json")
SMALL = Worker("8 slots, 25 ms a step", 8, 1_500.0, 0.025)
LARGE = Worker("32 slots, 30 ms a step", 32, 6_000.0, 0.030)
USERS = (10, 100, 1_000, 10_000)
FLEETS = ((10, 160), (100, 2_000), (300, 10_000), (1_000, 30_000), (1_000, 100_000))
"""Workers, streams."""
FLEET_STEP_S, FLEET_HOLD_S = 0.05, 15.0


def load() -> Trial:
    return msgspec.json.decode(MEASURED.read_bytes(), type=Trial)


def tables(trial: Trial) -> dict[str, str]:
    return {
        "costs": _unit_costs(trial),
        "users": _users(trial.costs),
        "fleets": _fleets(trial.costs),
        "loop": _loop(trial.costs),
    }


def _unit_costs(trial: Trial) -> str:
    rows = [(row.what, row.figure, row.ratio) for row in rows_of(trial)]
    return _table(("what", "figure", "off"), rows)


def _users(costs: Costs) -> str:
    rows = []
    for users in USERS:
        for worker in (SMALL, LARGE):
            found = plan(costs, Demand(users), worker)
            rows.append(
                (
                    f"{users:,}",
                    worker.name,
                    f"{found.calls_per_s:.2g}",
                    f"{found.streams:.0f}" if found.streams >= 1 else f"{found.streams:.1f}",
                    f"{found.workers} ({found.by_formula})",
                    f"{found.wait_p95_s:.1f} s",
                    f"{found.gateways}",
                    f"{found.gateway_cpu:.1%}, {found.gateway_mib:.0f} MiB",
                    f"{found.redis_cpu:.2%}",
                )
            )
    names = ("users", "worker", "calls/s", "streams", "workers (formula)", "p95 wait", "gateways", "of each", "Redis")
    return _table(names, rows)


def _fleets(costs: Costs) -> str:
    rows = []
    for workers, streams in FLEETS:
        fleet = Fleet(workers, streams, FLEET_STEP_S, streams / FLEET_HOLD_S)
        gateways = fewest_gateways(costs, fleet)
        cpu = fleet.cpu_of_redis(costs, gateways)
        rows.append(
            (
                f"{workers:,}",
                f"{streams:,}",
                f"{fleet.tokens_per_s:,.0f}",
                f"{fleet.calls_per_s:,.0f}",
                f"{gateways}",
                f"{streams / gateways:,.0f}",
                f"{(costs.gateway_bytes + streams / gateways * costs.stream_bytes) / 2**20:,.0f} MiB",
                f"{loop_wait(costs, fleet, gateways, seconds=2.0) * 1e3:.1f} ms",
                f"{cpu:.2f} cores" + (" (1)" if cpu > REDIS_CPU else ""),
            )
        )
    names = ("workers", "streams", "tokens/s", "calls/s", "gateways", "streams of each", "memory of each")
    return _table((*names, "p99 wait for its loop", "Redis"), rows)


def _loop(costs: Costs) -> str:
    """One gateway on 16 workers, by how busy it is."""
    rows = []
    for streams in (100, 200, 400, 600, 800):
        fleet = Fleet(16, streams, FLEET_STEP_S, streams / FLEET_HOLD_S)
        cpu = fleet.cpu_of_gateway(costs, 1)
        if cpu < 0.98:
            wait = loop_wait(costs, fleet, 1)
            rows.append(
                (f"{streams:,}", f"{cpu:.0%}", f"{wait * 1e3:.1f} ms", "" if cpu <= GATEWAY_CPU else "too busy")
            )
    return _table(("streams on 16 workers", "of its core", "p99 of a step's wait and work", ""), rows)


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
