"""Whether anything grows, and whether anything is left behind: one finding per question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.soak.record import Record, Rest
from benchmarks.soak.slope import HOUR_S, Slope, slope_of
from benchmarks.soak.storage import Stock
from benchmarks.soak.subjects import Life, Sample, Subject


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
    "fds": Bound(20.0, 6.0),
    "threads": Bound(10.0, 4.0),
    "tasks": Bound(20.0, 6.0),
}
"""Of a process; memory in MiB."""
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


def warm_samples(life: Life, record: Record) -> list[Sample]:
    """Those after the fleet's first rest, and after the process had the same time to warm up."""
    starts_s = max(record.rests[0].at_s if record.rests else 0.0, life.began_s + record.plan.warm_s)
    return [sample for sample in life.samples if sample.at_s >= starts_s]


def lasting_subjects(record: Record) -> Iterator[Subject]:
    """Those that were there at the last rest."""
    there = record.rests[-1].pids if record.rests else {}
    for name, subject in sorted(record.subjects.items()):
        if there.get(name) == subject.life.pid:
            yield subject


def growths(record: Record) -> Iterator[Growth]:
    for subject in lasting_subjects(record):
        samples = warm_samples(subject.life, record)
        for measure, bound in MEASURES.items():
            values = [float(getattr(sample, measure)) for sample in samples]
            slope = slope_of([sample.at_s for sample in samples], values)
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
    for measure, bound in MEASURES.items():
        steep = [growth for growth in grown if growth.measure == measure and not growth.flat]
        told = ", ".join(f"{one.subject} {one.slope.per_hour:+.1f}/h" for one in steep) or "flat"
        bar = f"<= {bound.per_hour:g}/h, or {bound.in_all:g} in all"
        yield Finding(f"{measure}: what grows", told, bar, not steep)


def _redis(record: Record) -> Iterator[Finding]:
    warm = [stock for stock in record.stocks if record.rests and stock.at_s >= record.rests[0].at_s]
    slope = slope_of([stock.at_s for stock in warm], [stock.used_mib for stock in warm])
    if slope is not None:
        told = f"{slope.per_hour:+.2f} MiB/h ({slope.low:+.2f} to {slope.high:+.2f})"
        yield Finding("Redis: memory used", told, f"<= {REDIS_MIB.per_hour:g}/h", REDIS_MIB.allows(slope))
    if len(record.rests) > 1:
        first, last = record.rests[0].stock, record.rests[-1].stock
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
    for number, rest in enumerate(rests, 1):
        bad = [f"{count:g} x {name}" for name, count in {**rest.held, **rest.busy}.items()]
        told = ", ".join(bad) or f"nothing, after {rest.took_s:.1f} s"
        yield Finding(f"rest {number}: leases, tickets and calls that are left", told, "nothing", not bad)
        whole = "; ".join(rest.breaches) or "whole"
        yield Finding(f"rest {number}: data of admission", whole, "whole", not rest.breaches)


def _returned(record: Record) -> Iterator[Finding]:
    """The last rest against the first one that each process saw."""
    if not record.rests:
        return
    bad = []
    for subject in lasting_subjects(record):
        name, pid = subject.name, subject.life.pid
        seen = [rest.samples[name] for rest in record.rests if rest.pids.get(name) == pid and name in rest.samples]
        if len(seen) > 1:
            bad += [f"{subject.name}: {more}" for more in _more(seen[0], seen[-1])]
    told = "; ".join(bad) or "as at its first rest"
    yield Finding("each process at the last rest", told, "as at its first rest", not bad)


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
