"""When the host of this machine ran one of its processors for others: waits that no process here is to blame for.

    python -m tests.security.host CPU        (ends when standard input is closed)

On a rented machine a processor may stand still for 50 ms and more, and everything on it. One process per processor goes
before all others there (SCHED_FIFO), sleeps for moments, and notes where it was woken late while the kernel's count of
stolen time rose (proc_stat(5), `steal`). It prints the `Pauses` at the end. Where that scheduling is not allowed, or
nothing is counted, there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from itertools import islice, takewhile
from math import inf
from pathlib import Path

import msgspec

NAP_S = 0.003
LATE_S = 0.003
LOOK_S = 0.1
"""The count of stolen time is read so often at least: what rose long before a pause is not the pause's."""
PRIORITY = 50
STEAL = 8
"""Column of a processor's line in /proc/stat, its name being the first."""

Span = tuple[float, float]
"""Begin and end, in seconds of the machine's monotonic clock."""

decode_spans = msgspec.json.Decoder(list[Span]).decode


class Pauses:
    """Spans in which the host ran one processor or more for others; they do not touch each other."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans: list[Span] = []
        for begin, end in sorted(spans):
            if self.spans and begin <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((begin, end))

    def length_without(self, span: Span) -> float:
        """Return the seconds of `span` in which no processor stood still."""
        begin, end = span
        first = max(0, bisect_right(self.spans, (begin, inf)) - 1)
        within = takewhile(lambda pause: pause[0] < end, islice(self.spans, first, None))
        return end - begin - sum(max(0.0, min(end, until) - max(begin, since)) for since, until in within)


@contextlib.asynccontextmanager
async def watched_host() -> AsyncIterator[list[Span]]:
    """Watch every processor; the list is filled at the end."""
    found: list[Span] = []
    pipe = asyncio.subprocess.PIPE
    watchers = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, str(cpu), stdin=pipe, stdout=pipe)
        for cpu in range(os.cpu_count() or 0)
    ]
    try:
        yield found
        for watcher in watchers:
            assert watcher.stdin is not None
            watcher.stdin.close()
            output, _ = await watcher.communicate()
            found += decode_spans(output)
    finally:
        for watcher in watchers:
            with contextlib.suppress(ProcessLookupError):
                watcher.kill()


def pauses_of(cpu: int, over: threading.Event) -> list[Span]:
    """Watch one processor until it is over."""
    try:
        os.sched_setaffinity(0, {cpu})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError:
        over.wait()
        return []
    found: list[Span] = []
    stolen, looked_at = _num_stolen(cpu), time.monotonic()
    while not over.is_set():
        slept_at = time.monotonic()
        time.sleep(NAP_S)
        woken_at = time.monotonic()
        is_late = woken_at - slept_at > NAP_S + LATE_S
        if is_late or woken_at - looked_at > LOOK_S:
            before, stolen, looked_at = stolen, _num_stolen(cpu), woken_at
            if is_late and stolen > before:
                found.append((slept_at + NAP_S, woken_at))
    return found


def _num_stolen(cpu: int) -> int:
    """Return the ticks that the host took from the processor since the machine's start."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{cpu}":
            return int(ticks[STEAL - 1]) if len(ticks) >= STEAL else 0
    return 0


def main() -> None:
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    sys.stdout.write(msgspec.json.encode(pauses_of(int(sys.argv[1]), over)).decode() + "\n")


if __name__ == "__main__":
    main()
