"""Writes the progress and the result of a run as text for a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from math import inf

from gateway.bench.document import Document, Spread
from gateway.bench.driver import Driver, Span

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def table(done: Document) -> str:
    return "\n".join(_lines(done))


def _lines(done: Document) -> Iterator[str]:
    calls, rates, tokens = done.calls, done.rates, done.tokens
    if done.ended == "interrupted":
        yield f"Interrupted: this is what was until then; {calls.unfinished} calls were left unfinished."
    yield (
        f"{calls.finished:,} of {calls.sent:,} calls answered in {done.measured_s:.1f} s"
        f" ({calls.warmup:,} of the warm-up left out), {calls.failed:,} failed"
    )
    yield (
        f"{rates.sent_per_s:.2f} calls/s sent, {rates.finished_per_s:.2f} answered,"
        f" {rates.in_flight_mean:.1f} in flight; {rates.tokens_per_s:,.1f} tokens/s out,"
        f" {rates.prompt_tokens_per_s:,.1f} in"
    )
    yield ""
    yield from _spreads(done)
    yield ""
    if tokens.cached_share is not None:
        yield f"cached: {tokens.cached_share:.1%} of {tokens.prompt:,} prompt tokens"
    yield from _queue(done)
    if done.goodput is not None:
        yield f"goodput ({done.goodput.slo}): {done.goodput.share:.1%} of calls, {done.goodput.per_s:.2f} calls/s"
    for kind, count in done.errors.items():
        yield f"error {kind}: {count:,} x, the first: {done.error_details.get(kind, '')}"
    yield from _teams(done)
    yield from _limit(done)
    for verdict in done.asserts:
        found = "nothing was measured" if verdict.value is None else f"{verdict.value:.4g}"
        yield f"{'held  ' if verdict.held else 'BROKEN'} {verdict.expression}: {found}"
    yield from _generator(done)


def _spreads(done: Document) -> Iterator[str]:
    yield f"{'':34}" + "".join(f"{name:>11}" for name in COLUMNS)
    yield _row("time to first token", done.ttft_s)
    yield _row("between tokens", done.itl_s)
    yield _row("per token after the first", done.tpot_s)
    yield _row("whole answer", done.e2e_s)


def _row(name: str, spread: Spread) -> str:
    cells = [time_text(getattr(spread, column)) if spread.count else "-" for column in COLUMNS]
    return f"{name:34}" + "".join(f"{cell:>11}" for cell in cells)


def _queue(done: Document) -> Iterator[str]:
    queue = done.queue
    if queue.told:
        text = f"queue: {queue.waited:,} of {queue.told:,} calls waited for a slot"
        if queue.waited:
            text += f", at position {queue.position.p50:.0f} (p50), {queue.position.max:.0f} (max)"
        if queue.predicted_wait_s.count:
            text += f", predicted wait {time_text(queue.predicted_wait_s.p50)} (p50)"
        yield text


def _teams(done: Document) -> Iterator[str]:
    for name, team in done.teams.items():
        yield (
            f"team {name}: {team.finished:,} answered, {team.failed:,} failed, {team.generated:,} tokens, first token"
            f" p50 {time_text(team.ttft_s.p50)}, p95 {time_text(team.ttft_s.p95)}"
        )


def _limit(done: Document) -> Iterator[str]:
    if done.limit is None:
        return
    rate = done.limit.sustainable_rate
    yield f"steps with {done.limit.objectives}:"
    for step in done.limit.steps:
        verdict = "held" if step.held else f"broke: {step.why}"
        yield f"  {step.rate:8.3f} calls/s, {step.sent:5,} calls, {step.tokens_per_s:9,.1f} tokens/s: {verdict}"
    if rate:
        yield f"sustainable: {rate:.3g} calls/s; the figures above are of that step"
    else:
        yield "sustainable: none of these rates; the figures above are of the first one"


def _generator(done: Document) -> Iterator[str]:
    generator = done.generator
    yield (
        f"generator: {generator.cpu_share:.0%} of a core, {generator.cpu_us_per_piece:.1f} us per token, loop late by"
        f" {time_text(generator.loop_lag_s.p99)} (p99), calls by {time_text(generator.late_s.p99)} (p99)"
    )
    if generator.saturated:
        yield "WARNING: the generator was saturated: these times are its own as much as the server's; ask for less, or"
        yield "share the load among several `paddock bench` on several cores"


def time_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


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
                # The rate is smoothed if it is drawn more often than once per second.
                weight = min(1.0, (now - told_at) / 1.0)
                rate += weight * ((pieces - told_pieces) / (now - told_at) - rate)
                told_at, told_pieces = now, pieces
                line = label + status(driver, span, now, rate)
                print(f"{CLEAR}{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
                sys.stderr.flush()
        finally:
            self.clear()

    def tell(self, line: str) -> None:
        """Print a line that the progress does not overwrite."""
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)


def status(driver: Driver, span: Span, now: float, rate: float) -> str:
    """Return a line that shows the progress of a run. `rate`: pieces of answers per second."""
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
