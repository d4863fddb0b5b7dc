"""Shows the progress of a run: one line that is redrawn on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import asyncio
import sys
import time
from math import inf

from gateway.bench.driver import Driver, Span

TERMINAL_EVERY_S, PIPE_EVERY_S = 0.25, 10.0
WIDTH = 24
CLEAR = "\r\x1b[2K"


class Progress:
    """Shows the progress of runs, one after the other, on stderr."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    async def follow(self, driver: Driver, span: Span, label: str = "") -> None:
        """Show a run's progress until cancelled."""
        every = TERMINAL_EVERY_S if self._terminal else PIPE_EVERY_S
        told_at, told_pieces, rate = time.perf_counter(), 0, 0.0
        try:
            while True:
                await asyncio.sleep(every)
                now, pieces = time.perf_counter(), _pieces(driver)
                # Smoothed where it is drawn often.
                weight = min(1.0, (now - told_at) / 1.0)
                rate += weight * ((pieces - told_pieces) / (now - told_at) - rate)
                told_at, told_pieces = now, pieces
                line = label + status(driver, span, now, rate)
                print(f"{CLEAR}{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
                sys.stderr.flush()
        finally:
            self.clear()

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)


def status(driver: Driver, span: Span, now: float, rate: float) -> str:
    """Return the line of progress. `rate`: pieces of answers per second."""
    run = driver.run
    passed, sent, running = now - run.began, len(run.tapes), len(run.running)
    failed = sum(bool(tape.error) for tape in run.tapes)
    parts = [f"{sent:,} sent", f"{running:,} running", f"{rate:,.0f} tokens/s"]
    if failed:
        parts.append(f"{failed:,} failed")
    if run.sending_ended:
        parts.append("waiting for the last answers")
    if span.seconds < inf:
        return f"{_bar(passed / span.seconds)} {min(passed, span.seconds):.0f}/{span.seconds:.0f} s, {', '.join(parts)}"
    if span.calls < inf:
        return f"{_bar((sent - running) / span.calls)} {sent - running:,}/{span.calls:,.0f} calls, {', '.join(parts)}"
    return f"{passed:.0f} s, {', '.join(parts)}"


def _bar(part: float) -> str:
    done = round(WIDTH * min(1.0, max(0.0, part)))
    return f"[{'#' * done}{'.' * (WIDTH - done)}]"


def _pieces(driver: Driver) -> int:
    run = driver.run
    return run.pieces + sum(len(run.tapes[number].times) for number in run.running)
