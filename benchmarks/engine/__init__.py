"""The engine against llama-server: every row of the README's table on what is done with the KV cache and the schedule.

    python -m benchmarks engine [--only decode,shared] [--quick] [--rounds N] [--patient]

Paddock is one worker process asked over the worker protocol, with no gateway; llama-server is the C++ server of the
same llama.cpp. One of them runs at a time, on one core and one thread; the load has the other core; rounds alternate,
and every figure is the median of the rounds with the least and the most beside it.
"""

from __future__ import annotations

import asyncio
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.engine import burst, conversations, decode, long_prompt, shared
from benchmarks.engine.bench import Bench, big_model, compared, on_load_core, toy_model
from benchmarks.engine.calls import Unmeasured
from benchmarks.engine.servers import COMPUTE_CORE
from benchmarks.table import Row
from tests.support.stack import Stack

PARTS: dict[str, Callable[[Bench], Awaitable[list[Row]]]] = {
    "decode": decode.measure,
    "shared": shared.measure,
    "long": long_prompt.measure,
    "conversations": conversations.measure,
    "restarted": conversations.measure_restarted,
    "burst": burst.measure,
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What of it to measure, and how long."""

    parts: tuple[str, ...] = tuple(PARTS)
    quick: bool = False
    patient: bool = False
    toy: bool = False
    rounds: int = 0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--only", type=parts, default=tuple(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and the small model where it will do")
    parser.add_argument("--patient", action="store_true", help="the 16k prompt on the 0.5 B model too: minutes a run")
    parser.add_argument("--toy", action="store_true", help="the 2-layer model everywhere, to try the benchmark out")
    parser.add_argument("--rounds", type=int, default=0, help="0: as many as each part thinks right")


def parts(text: str) -> tuple[str, ...]:
    """Raises ArgumentTypeError for a part that there is none of."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ArgumentTypeError(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def wish(arguments: Namespace) -> Wish:
    return Wish(arguments.only, arguments.quick, arguments.patient, arguments.toy, arguments.rounds)


def measure(rounds: int, wish: Wish | None = None) -> list[Row]:
    """`rounds` 0: as many as each part thinks right."""
    wish = wish or Wish()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("the engine's benchmark needs two cores: one for the server, one for the load")
    print(compared(), flush=True)
    rows: list[Row] = []
    with on_load_core(), Stack(measured=True, cores={"worker": COMPUTE_CORE, "redis": COMPUTE_CORE}) as stack:
        toy = toy_model()
        bench = Bench(stack, toy if wish.toy else big_model(), toy, wish.quick, wish.patient, wish.rounds or rounds)
        for name in wish.parts:
            rows += measured(name, bench)
    return rows


def measured(name: str, bench: Bench) -> list[Row]:
    """The rows of one part; one row that says why, where there is no figure."""
    try:
        return asyncio.run(_run(PARTS[name], bench))
    except* Unmeasured as errors:
        reasons = "; ".join(str(error) for error in _flat(errors))
    bench.say(f"{name}: not measured: {reasons}")
    return [Row(name, f"not measured: {reasons}", "", "measured", False)]


async def _run(part: Callable[[Bench], Awaitable[list[Row]]], bench: Bench) -> list[Row]:
    return await part(bench)


def _flat(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        one
        for error in group.exceptions
        for one in (_flat(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
