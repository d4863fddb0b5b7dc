"""Models that calls load, side by side with llama-server's router and with llama-swap: behaviour, storms, swap times.

    python -m benchmarks models             all of it
    python -m benchmarks.models --help      a part of it

Real processes serve the same files with the same slots, context and threads, and have two models loaded at most. What
can't be had on this machine is left out, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from benchmarks.field.install import Missing
from benchmarks.models import storm, swaps
from benchmarks.models.calls import Caller, calling
from benchmarks.models.files import SIX, files
from benchmarks.models.scenarios import POINTS, Outcome, Unprepared
from benchmarks.models.systems import SYSTEMS, System
from benchmarks.synthetic_model import synthetic_model
from benchmarks.table import Row

OURS = "paddock"
ROUNDS = 5
LARGE = "synthetic-0.5b"
SWAPPED = ("demo", LARGE)

Outcomes = dict[tuple[str, str], Outcome]
"""(Point, system) -> what was seen."""


async def compared(systems: Iterable[str], points: Sequence[str], models: Mapping[str, Path]) -> Outcomes:
    """Return the outcomes of these scenarios, one system after the other."""
    found: Outcomes = {}
    for name in systems:
        try:
            with SYSTEMS[name](models, None) as system:
                found |= await _outcomes(name, system, points)
        except Missing as error:
            found |= {(point, name): Outcome(f"not run: {error}", False) for point in points}
    return found


async def _outcomes(name: str, system: System, points: Sequence[str]) -> Outcomes:
    found: Outcomes = {}
    async with calling(system) as caller:
        await warm(caller)
        for point in points:
            print(f"{name}: {POINTS[point][0]} ...", flush=True)
            try:
                found[point, name] = await POINTS[point][1](caller)
            except Unprepared as error:
                found[point, name] = Outcome(f"not shown: {error}", False)
            print(f"    {found[point, name].said}", flush=True)
    return found


async def warm(caller: Caller) -> None:
    """Have every model answer once, so that files are in memory and Paddock has predicted what they take."""
    for model in SIX:
        for _ in range(3):
            if (await caller.ask(model)).is_answered:
                break


async def swapped(systems: Iterable[str], names: Sequence[str], rounds: int) -> list[Row]:
    """Return the swap times of these models, of all systems that can be had."""
    models = {**files(), LARGE: synthetic_model()} if LARGE in names else files()
    rows: list[Row] = []
    with ExitStack() as held:
        async with AsyncExitStack() as calls:
            callers: dict[str, Caller] = {}
            for system in systems:
                try:
                    started = held.enter_context(SYSTEMS[system](models, None))
                except Missing as error:
                    rows.append(Row(f"swap times, {system}", f"not run: {error}", "", "", True))
                    continue
                callers[system] = await calls.enter_async_context(calling(started))
                await warm(callers[system])
            for name in names:
                rows += swaps.rows(name, await swaps.measured(callers, models, name, rounds))
    return rows


async def stormed(
    systems: Iterable[str], num_calls: int, gap_s: float, seed: int, stay_s: float | None = None
) -> list[Row]:
    """Return the figures of a storm of calls. `stay_s`: Paddock's `min_resident_s`; None: as by default."""
    rows: list[Row] = []
    for name in systems:
        try:
            with SYSTEMS[name]({model: files()[model] for model in SIX}, stay_s) as system:
                async with calling(system) as caller:
                    await warm(caller)
                    rows.append(storm.lone_row(name, await storm.one_caller(caller)))
                    done = await storm.run(caller, num_calls, gap_s=gap_s, seed=seed)
            rows += storm.rows(name, done, has_bars=name == OURS)
        except (Missing, Unprepared) as error:
            rows.append(Row(f"{name}: storm", f"not run: {error}", "", "", name != OURS))
    return rows


def outcome_rows(outcomes: Outcomes) -> list[Row]:
    """Return a row for each point and system. Only Paddock's have a bar."""
    rows = []
    for (point, system), outcome in sorted(outcomes.items(), key=lambda item: [*POINTS].index(item[0][0])):
        has_bar = system == OURS
        bar = "as it should be" if has_bar else ""
        rows.append(Row(f"{POINTS[point][0]}: {system}", outcome.said, "", bar, outcome.is_good or not has_bar))
    return rows


def table(outcomes: Outcomes) -> str:
    """Return the outcomes as a Markdown table with a column for each system."""
    systems = list(dict.fromkeys(system for _, system in outcomes))
    lines = [f"| point | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for point in dict.fromkeys(point for point, _ in outcomes):
        cells = [outcomes[point, system] for system in systems]
        marks = [("" if cell.is_good else "**no**: ") + cell.said.replace("|", "/") for cell in cells]
        lines.append(f"| {POINTS[point][0]} | {' | '.join(marks)} |")
    return "\n".join(lines)


def measure(size: int) -> list[Row]:
    """Return the rows of all parts. `size`: calls of the storm."""
    outcomes = asyncio.run(compared(SYSTEMS, [*POINTS], files()))
    rows = outcome_rows(outcomes)
    rows += asyncio.run(swapped(SYSTEMS, SWAPPED, ROUNDS))
    return rows + asyncio.run(stormed([OURS], size, storm.GAP_S, 0))
