"""`make soak`: a fleet under mixed load and faults for a long time; exits 1 when something grows or is left behind.

    python -m benchmarks.soak --minutes 30

Tables go to the terminal, everything else into `build/soak`. Takes one core and a half, and about 1.5 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.soak.conductor import Conductor
from benchmarks.soak.crowd import Crowd
from benchmarks.soak.fleet import Fleet, running_fleet
from benchmarks.soak.record import Plan, Record
from benchmarks.soak.report import print_report, write_report
from benchmarks.soak.subjects import Watch
from benchmarks.soak.verdict import findings

OUT = Path(__file__).resolve().parents[2] / "build" / "soak"
LOG_BYTES = 1 << 20
QUIET_S = 30.0
"""Between two lines of progress where nobody sees them change."""


async def soak(plan: Plan, out: Path, tell: Callable[[str], None]) -> bool:
    """Whether all is well."""
    async with running_fleet() as fleet:
        record = Record(plan, fleet.names)
        crowd = Crowd(fleet, record, random.Random(plan.seed))
        try:
            await Conductor(fleet, crowd, record, tell, Watch(record.subjects)).run()
        finally:
            keep_logs(fleet, out)
    found = findings(record)
    write_report(record, found, out)
    print_report(record, found)
    return all(one.good for one in found)


def keep_logs(fleet: Fleet, out: Path) -> None:
    """What each process wrote, its last `LOG_BYTES`."""
    folder = out / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.log"):
        old.unlink()
    for process in fleet.stack.processes:
        (folder / process.log.name).write_bytes(process.log.read_bytes()[-LOG_BYTES:])


def progress() -> Callable[[str], None]:
    """One line that changes on a terminal, a line now and then elsewhere."""
    last = 0.0

    def tell(line: str) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"\r\033[K{line[:200]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last > QUIET_S:
            last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return tell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of load; filling caches comes on top (default: 30)"
    )
    parser.add_argument("--rate", type=float, default=5.0, help="deeds of callers per second (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of who comes when, and what breaks (default: 0)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for soak.json and soak.html")
    given = parser.parse_args()
    plan = Plan(given.minutes * 60, given.rate, given.seed)
    return 0 if asyncio.run(until_told(soak(plan, given.out, progress()))) else 1


async def until_told(running: Coroutine[Any, Any, bool]) -> bool:
    """Ends it on SIGTERM as on Ctrl-C: nothing of the fleet is left."""
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(main())
