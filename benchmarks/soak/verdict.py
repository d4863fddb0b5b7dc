"""Whether anything grows, and whether anything is left behind: one finding per question."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.soak.record import Record, Rest
from benchmarks.soak.slope import HOUR_S, Slope, slope_of
from benchmarks.soak.storage import Stock
from benchmarks.soak.subjects import Sample, Subject


@dataclass(frozen=True, slots=True)
class Bound:
    """What still counts as flat: growth of `per_hour`, or of `in_all` over what was measured, whichever is more.

    The second is for short soaks: what an allocator takes once is a steep slope there.
    """

    per_hour: float
    in_all: float

    def allows(self, slope: Slope) -> bool:
        """Whether this is flat. What shrinks, and what may well not grow at all, is."""
        grown = slope.per_hour * slope.span_s / HOUR_S
        return not slope.grows or slope.per_hour <= self.per_hour or grown <= self.in_all


MEASURES: Mapping[str, Bound] = {
    "rss": Bound(6.0, 3.0),
    "uss": Bound(6.0, 3.0),
    "children_rss": Bound(6.0, 3.0),
    "fds": Bound(10.0, 8.0),
    "threads": Bound(10.0, 4.0),
    "tasks": Bound(10.0, 8.0),
}
"""Of a process; memory in MiB."""
AT_RESTS = ("fds", "threads", "tasks")
"""What calls have while they run: only what is there without calls is compared."""
RETURNED_MIB, RETURNED_SHARE = 6.0, 0.06
"""Memory at the last rest may be so much above what it was at the first rest of the process."""
MORE_FDS, MORE_TASKS, MORE_THREADS = 8, 8, 4
"""At the last rest, above the first one of the process: connections that are kept for the next call."""
REDIS_MIB = Bound(6.0, 3.0)
MORE_LASTING = 2
MORE_ELEMENTS, MORE_ELEMENTS_SHARE = 60, 0.2
"""Keys that never expire, and elements of a family, at the last rest above the first one."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    told: str
    bar: str
    good: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """One measure of one process's last life, after it had warmed up."""

    subject: str
    measure: str
    slope: Slope
    first: float
    last: float
    flat: bool


def warm_samples(subject: Subject, measure: str, record: Record) -> list[Sample]:
    """Those after the fleet was warm, and after the process had as long to warm up; of counts those of rests."""
    life = subject.life
    starts_s = max(record.warm_at_s, life.began_s + record.plan.warm_s)
    if measure in AT_RESTS:
        rests = [rest for rest in record.rests if rest.pids.get(subject.name) == life.pid]
        samples = [rest.samples[subject.name] for rest in rests if subject.name in rest.samples]
    else:
        samples = life.samples
    return [sample for sample in samples if sample.at_s >= starts_s]


def lasting_subjects(record: Record) -> Iterator[Subject]:
    """Those that were there at the last rest."""
    there = record.rests[-1].pids if record.rests else {}
    for name, subject in sorted(record.subjects.items()):
        if there.get(name) == subject.life.pid:
            yield subject


def growths(record: Record) -> Iterator[Growth]:
    for subject in lasting_subjects(record):
        for measure, bound in MEASURES.items():
            samples = warm_samples(subject, measure, record)
            values = [float(getattr(sample, measure)) for sample in samples]
            points = [(sample.at_s, value) for sample, value in zip(samples, values, strict=True)]
            # What filling caches once more takes stays taken: it is no growth under load, and the last rest shows it.
            loads = [(0.0, math.inf)] if measure in AT_RESTS or not record.loads else record.loads
            slope = slope_of(*([point for point in points if began <= point[0] <= ended] for began, ended in loads))
            if slope is not None and min(values) >= 0:
                yield Growth(subject.name, measure, slope, values[0], values[-1], bound.allows(slope))


def findings(record: Record) -> list[Finding]:
    """Of a soak that has ended."""
    return [
        *_slopes(record),
        *_redis(record),
        *_rests(record.rests),
        *_returned(record),
        *_ends(record),
    ]


def _slopes(record: Record) -> Iterator[Finding]:
    grown = list(growths(record))
    measured = {growth.subject for growth in grown if growth.measure == "rss"}
    there = [subject.name for subject in lasting_subjects(record)]
    unknown = [name for name in there if name not in measured]
    told = f"{len(there) - len(unknown)} of {len(there)}" + (f"; not {', '.join(unknown)}" if unknown else "")
    yield Finding("processes that were measured for long enough", told, "all", bool(there) and not unknown)
    for measure, bound in MEASURES.items():
        steep = [growth for growth in grown if growth.measure == measure and not growth.flat]
        told = ", ".join(f"{one.subject} {one.slope.per_hour:+.1f}/h" for one in steep) or "flat"
        bar = f"<= {bound.per_hour:g}/h, or {bound.in_all:g} in all"
        yield Finding(f"{measure}: what grows", told, bar, not steep)


def _redis(record: Record) -> Iterator[Finding]:
    warm = [stock for stock in record.stocks if stock.at_s >= record.warm_at_s]
    rests = [rest for rest in record.rests if rest.at_s >= record.warm_at_s]
    slope = slope_of([(stock.at_s, stock.used_mib) for stock in warm])
    if slope is not None:
        told = f"{slope.per_hour:+.2f} MiB/h ({slope.low:+.2f} to {slope.high:+.2f})"
        yield Finding("Redis: memory used", told, f"<= {REDIS_MIB.per_hour:g}/h", REDIS_MIB.allows(slope))
    if len(rests) > 1:
        first, last = rests[0].stock, rests[-1].stock
        more = sorted({*_lasting(first, last), *_elements(first, last)})
        yield Finding("Redis: more than at the first rest", ", ".join(more) or "nothing", "nothing", not more)


def _lasting(first: Stock, last: Stock) -> Iterator[str]:
    for family, count in last.lasting.items():
        if count > (before := first.lasting.get(family, 0)) + MORE_LASTING:
            yield f"{family} {before} -> {count} keys that never expire"


def _elements(first: Stock, last: Stock) -> Iterator[str]:
    for family, count in last.elements.items():
        before = first.elements.get(family, 0)
        if count > before + max(MORE_ELEMENTS, MORE_ELEMENTS_SHARE * before):
            yield f"{family} {before} -> {count} elements"


def _rests(rests: Sequence[Rest]) -> Iterator[Finding]:
    held = [
        f"rest {number}: {count:g} x {name}"
        for number, rest in enumerate(rests, 1)
        for name, count in {**rest.held, **rest.busy}.items()
    ]
    longest_s = max((rest.took_s for rest in rests), default=0.0)
    told = "; ".join(held) or f"nothing, {longest_s:.1f} s after the last call at most"
    yield Finding(f"leases, tickets and calls left at {len(rests)} rests", told, "nothing", bool(rests) and not held)
    broken = [f"rest {number}: {one}" for number, rest in enumerate(rests, 1) for one in rest.breaches]
    yield Finding("data of admission at rests", "; ".join(broken) or "whole", "whole", not broken)


def _returned(record: Record) -> Iterator[Finding]:
    """The last rest against the first long one that each process saw."""
    if not record.rests:
        return
    bad = []
    for subject in lasting_subjects(record):
        name, pid = subject.name, subject.life.pid
        there = [rest for rest in record.rests if rest.is_long and rest.pids.get(name) == pid]
        seen = [rest.samples[name] for rest in there if name in rest.samples]
        if len(seen) > 1:
            bad += [f"{subject.name}: {more}" for more in _more(seen[0], seen[-1])]
    told = "; ".join(bad) or "as at its first long one"
    yield Finding("each process at the last rest", told, "as at its first long one", not bad)


def _more(first: Sample, last: Sample) -> Iterator[str]:
    if last.rss > first.rss + max(RETURNED_MIB, RETURNED_SHARE * first.rss):
        yield f"{first.rss:.0f} -> {last.rss:.0f} MiB"
    counted = (("fds", MORE_FDS), ("tasks", MORE_TASKS), ("threads", MORE_THREADS), ("children", 2))
    for name, more in counted:
        before, after = getattr(first, name), getattr(last, name)
        if after > before + more:
            yield f"{before} -> {after} {name}"


def _ends(record: Record) -> Iterator[Finding]:
    there = record.rests[-1].samples if record.rests else {}
    missing = [name for name in record.names if name not in there]
    yield Finding("processes that are missing at the last rest", ", ".join(missing) or "none", "none", not missing)
    codes = {name: code for name, code in record.exits.items() if code}
    yield Finding("exit codes other than 0", str(codes or "none"), "none", not codes)
    yield Finding("processes that are left", "; ".join(record.orphans) or "none", "none", not record.orphans)
    left = ", ".join(f"{count} x {name}" for name, count in record.leftovers.items())
    yield Finding("records that are left in Redis", left or "none", "none", not left)
    told = f"{record.num_surprises} of {record.num_deeds}" + "".join(f"; {one}" for one in record.surprises[:3])
    yield Finding("answers that nobody should get", told, "0", record.num_surprises == 0)
    failed = [f"{one.fault}: {one.failure}" for one in record.faults if one.failure]
    yield Finding("faults that could not be done", "; ".join(failed[:3]) or "none", "none", not failed)
