"""Computes a run's result (a `Document`) from the records of the run's calls (`Tape`).

Percentiles are computed by nearest rank, so each is a value that was measured.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

from gateway import __version__
from gateway.bench.bounds import Bound, met
from gateway.bench.connection import UNFINISHED, Tape
from gateway.bench.document import (
    SCHEMA,
    Calls,
    Document,
    Generator,
    Goodput,
    Group,
    Queue,
    Rates,
    Second,
    Spread,
    Tokens,
)
from gateway.bench.driver import Run

POINTS = 100


def spread(values: Iterable[float]) -> Spread:
    """Return the distribution of the values; all fields are 0 if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    p50, p90, p95, p99 = (_digits(quantile(ordered, share)) for share in (0.5, 0.9, 0.95, 0.99))
    mean = _digits(sum(ordered) / len(ordered))
    return Spread(len(ordered), mean, p50, p90, p95, p99, _digits(ordered[-1]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile at `share` (0 to 1) by nearest rank. `ordered`: the sorted values, not empty."""
    return ordered[max(0, min(len(ordered), ceil(share * len(ordered) - 1e-9)) - 1)]


def curve(values: Iterable[float]) -> tuple[float, ...]:
    """Return the percentiles 0 to 100 of the values; empty if there are no values."""
    ordered = sorted(values)
    return tuple(_digits(quantile(ordered, at / POINTS)) for at in range(POINTS + 1)) if ordered else ()


def _digits(value: float) -> float:
    """Round a time to microseconds."""
    return round(value, 6)


MOST_LAG_S = 0.05
"""Seconds: the load generator counts as saturated if the p99 of its event loop's lag is above this."""
MOST_CPU = 0.9
MOST_SECONDS = 240
"""Maximum number of intervals in `series`: in runs of more seconds, each interval is longer than a second."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The facts about a run that are not in the records of its calls (`Tape`)."""

    started_at: str
    settings: Mapping[str, str | float | int | bool | None]
    warmup_s: float
    slo: tuple[Bound, ...] = ()


def document(run: Run, frame: Frame) -> Document:
    began = run.began + frame.warmup_s
    # If a run was stopped in its warm-up, or sent no calls after it, the warm-up is reported.
    if run.sending_ended <= began or all(tape.due < began for tape in run.tapes):
        began = run.began
    tapes = [tape for tape in run.tapes if tape.due >= began]
    good = [tape for tape in tapes if tape.good]
    failed = [tape for tape in tapes if tape.error and tape.error != UNFINISHED]
    ends = max(run.sending_ended, began + 1e-3)
    ttft, gaps, e2e = [tape.ttft_s for tape in good], _gaps(good), [tape.e2e_s for tape in good]
    details = {tape.error: tape.detail for tape in reversed(failed)}
    return Document(
        schema=SCHEMA,
        version=__version__,
        started_at=frame.started_at,
        ended="interrupted" if run.interrupted else "done",
        settings=dict(frame.settings),
        warmup_s=round(began - run.began, 3),
        measured_s=round(ends - began, 3),
        calls=Calls(len(tapes), len(good), len(failed), _unfinished(tapes), len(run.tapes) - len(tapes)),
        rates=_rates(run, began, ends),
        tokens=_tokens(good),
        ttft_s=spread(ttft),
        itl_s=spread(gaps),
        tpot_s=spread(tape.tpot_s for tape in good if tape.tokens > 1),
        e2e_s=spread(e2e),
        queue=_queue(tapes),
        goodput=_goodput(frame.slo, good, failed, ends - began) if frame.slo else None,
        errors=dict(Counter(tape.error for tape in failed).most_common()),
        error_details=details,
        teams=_teams(tapes),
        generator=_generator(run),
        series=_series(run),
        curves={"ttft_s": curve(ttft), "itl_s": curve(gaps), "e2e_s": curve(e2e)},
    )


def _gaps(tapes: Sequence[Tape]) -> list[float]:
    return list(chain.from_iterable(tape.gaps() for tape in tapes))


def _unfinished(tapes: Sequence[Tape]) -> int:
    return sum(tape.error == UNFINISHED for tape in tapes)


def _between(tape: Tape, start: float, end: float) -> float:
    """Estimate how many tokens of an answer came between two times, from the share of its pieces that came then."""
    if not tape.times:
        return 0.0
    pieces = bisect_right(tape.times, end) - bisect_left(tape.times, start)
    return pieces * tape.tokens / len(tape.times)


def _rates(run: Run, began: float, ends: float) -> Rates:
    seconds = ends - began
    over = [tape for tape in run.tapes if tape.good and began <= tape.ended <= ends]
    busy = sum(max(0.0, min(tape.ended, ends) - max(tape.sent, began)) for tape in run.tapes if tape.ended)
    return Rates(
        sent_per_s=round(sum(began <= tape.due < ends for tape in run.tapes) / seconds, 3),
        finished_per_s=round(len(over) / seconds, 3),
        tokens_per_s=round(sum(_between(tape, began, ends) for tape in run.tapes) / seconds, 2),
        prompt_tokens_per_s=round(sum(tape.prompt_tokens for tape in over) / seconds, 2),
        in_flight_mean=round(busy / seconds, 2),
    )


def _tokens(good: Sequence[Tape]) -> Tokens:
    told = [tape for tape in good if tape.cached_tokens is not None]
    cached = sum(tape.cached_tokens or 0 for tape in told)
    whole = sum(tape.prompt_tokens for tape in told)
    return Tokens(
        prompt=sum(tape.prompt_tokens for tape in good),
        cached=cached,
        cached_share=round(cached / whole, 4) if whole else None,
        generated=sum(tape.tokens for tape in good),
        pieces=sum(len(tape.times) for tape in good),
    )


def _queue(tapes: Sequence[Tape]) -> Queue:
    positions = [tape.position for tape in tapes if tape.position is not None]
    return Queue(
        told=len(positions),
        waited=sum(position > 0 for position in positions),
        position=spread(position for position in positions if position > 0),
        predicted_wait_s=spread(tape.wait_s for tape in tapes if tape.wait_s is not None),
    )


def _goodput(slo: tuple[Bound, ...], good: Sequence[Tape], failed: Sequence[Tape], seconds: float) -> Goodput:
    well = sum(met(slo, tape) for tape in good)
    return Goodput(
        slo=",".join(bound.text for bound in slo),
        share=round(well / max(1, len(good) + len(failed)), 4),
        per_s=round(well / seconds, 3),
    )


def _teams(tapes: Sequence[Tape]) -> dict[str, Group]:
    names = sorted({tape.team for tape in tapes})
    return {name: _group([tape for tape in tapes if tape.team == name]) for name in names} if len(names) > 1 else {}


def _group(tapes: Sequence[Tape]) -> Group:
    good = [tape for tape in tapes if tape.good]
    return Group(
        finished=len(good),
        failed=len(tapes) - len(good) - _unfinished(tapes),
        generated=sum(tape.tokens for tape in good),
        ttft_s=spread(tape.ttft_s for tape in good),
        e2e_s=spread(tape.e2e_s for tape in good),
    )


def _generator(run: Run) -> Generator:
    pieces = sum(len(tape.times) for tape in run.tapes)
    share = run.cpu_s / max(1e-6, run.ended - run.began)
    lag = spread(run.lags)
    late = spread(tape.late_s for tape in run.tapes)
    return Generator(
        cpu_share=round(share, 4),
        cpu_us_per_piece=round(run.cpu_s / pieces * 1e6, 2) if pieces else 0.0,
        late_s=late,
        loop_lag_s=lag,
        saturated=share > MOST_CPU or (bool(run.lags) and quantile(sorted(run.lags), 0.99) > MOST_LAG_S),
    )


def _series(run: Run) -> tuple[Second, ...]:
    lasted = max(run.ended - run.began, 1e-3)
    step = float(max(1, ceil(lasted / MOST_SECONDS)))
    count = ceil(lasted / step)
    tokens, busy, finished, failed = [0.0] * count, [0.0] * count, [0] * count, [0] * count

    def place(at: float) -> int:
        return min(count - 1, max(0, int((at - run.began) / step)))

    for tape in run.tapes:
        each = tape.tokens / len(tape.times) if tape.times else 0.0
        for at in tape.times:
            tokens[place(at)] += each
        for at in range(place(tape.sent), place(tape.ended) + 1):
            start = run.began + at * step
            busy[at] += max(0.0, min(tape.ended, start + step) - max(tape.sent, start))
        if tape.error != UNFINISHED:
            (failed if tape.error else finished)[place(tape.ended)] += 1
    series = []
    for at in range(count):
        # The last interval is shorter. If it is very short, its rate would be misleading, so half a step is assumed.
        width = min(step, lasted - at * step)
        rate, running = tokens[at] / max(width, step / 2), busy[at] / max(width, 1e-6)
        series.append(Second(at * step, round(rate, 2), round(running, 2), finished[at], failed[at]))
    return tuple(series)
