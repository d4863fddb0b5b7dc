"""Remembers each subject's counters: those that this gateway process has counted itself, and all as Redis last told
them. They are needed when Redis is away or has lost them.

Whatever a process has counted is either *told* to Redis or *untold*: admitted or given back without Redis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic, time

from gateway.store.limits import TICK_MS, WINDOW_S, WINDOW_TICKS, Report

Ticks = dict[int, list[int]]
"""Tick of a window -> [requests, tokens]."""


class RedisClock:
    """Redis's clock, as its last answers told it."""

    def __init__(self) -> None:
        self._ahead_ms = (time() - monotonic()) * 1000

    def set(self, now_ms: int) -> None:
        self._ahead_ms = now_ms - monotonic() * 1000

    @property
    def tick(self) -> int:
        """The tick of now."""
        return int(monotonic() * 1000 + self._ahead_ms) // TICK_MS


@dataclass(frozen=True, slots=True)
class Sums:
    """Requests and tokens."""

    requests: int = 0
    tokens: int = 0

    def __sub__(self, other: Sums) -> Sums:
        return Sums(max(0, self.requests - other.requests), max(0, self.tokens - other.tokens))


NONE = Sums()
SAMPLE_S = 0.5
"""Minimum seconds over which the growth of a window is measured."""


@dataclass(slots=True, eq=False)
class SubjectCounts:
    """The known counters of one subject. Times are time.monotonic()."""

    name: str
    told: Ticks = field(default_factory=dict)
    untold: Ticks = field(default_factory=dict)
    calls: int = 0
    """Calls of this process that are under way."""
    calls_told: int = 0
    """Calls of this process that Redis counts, once it has run all messages."""
    untold_periods: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Field -> begin of the period, and what to add there."""

    heard_at: float = 0.0
    """When Redis last told the counters; 0: never."""
    heard_tick: int = 0
    heard: Sums = NONE
    """The sums of the window at `heard_at`, of all gateways."""
    heard_calls: int = 0
    heard_own_calls: int = 0
    """Calls among `heard_calls` that are this process's."""
    periods: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Field -> begin of the period, and what was counted in it by all gateways."""
    sampled_at: float = 0.0
    sample: Sums = NONE
    growth: tuple[float, float] = (0.0, 0.0)
    """Requests and tokens per second by which the window grew lately."""
    refused_at: float = 0.0
    """When a call was refused last; 0: never."""

    def hear(self, tick: int, now: float, requests: int, tokens: int, calls: int) -> None:
        """Note what Redis says of the window and of calls under way."""
        self.heard_at, self.heard_tick, self.heard = now, tick, Sums(requests, tokens)
        self.heard_calls, self.heard_own_calls = calls, self.calls_told
        if (passed_s := now - self.sampled_at) >= SAMPLE_S:
            more = self.heard - self.sample
            self.growth = (more.requests / passed_s, more.tokens / passed_s) if self.sampled_at else (0.0, 0.0)
            self.sampled_at, self.sample = now, self.heard

    def own_when_heard(self) -> Sums:
        """Return the part of `heard` that this process has counted, as far as it still knows."""
        within = range(self.heard_tick - WINDOW_TICKS, self.heard_tick + 1)
        entries = [entry for when, entry in self.told.items() if when in within]
        return Sums(sum(entry[0] for entry in entries), sum(entry[1] for entry in entries))

    def own(self, tick: int) -> Sums:
        """Return what this process has counted in the window that ends with the tick, told or not."""
        requests = tokens = 0
        for ticks in (self.told, self.untold):
            _drop_old(ticks, tick)
            for entry in ticks.values():
                requests += entry[0]
                tokens += entry[1]
        return Sums(max(0, requests), max(0, tokens))

    def count_told(self, tick: int, requests: int, tokens: int) -> None:
        _add(self.told, tick, requests, tokens)

    def count_untold(self, tick: int, requests: int, tokens: int) -> None:
        _add(self.untold, tick, requests, tokens)

    def count_period(self, field_: str, begin: int, more: int) -> None:
        """Add to a period without Redis; what was added to an earlier one is dropped."""
        before, value = self.untold_periods.get(field_, (begin, 0))
        if before <= begin:
            self.untold_periods[field_] = (begin, more + (value if before == begin else 0))

    @property
    def has_untold(self) -> bool:
        return bool(self.untold or self.untold_periods or self.calls != self.calls_told)

    def is_idle(self, tick: int, now: float) -> bool:
        """Return whether nothing of the subject is worth keeping: it was not used within a window's length."""
        busy = self.has_untold or self.calls or self.periods or now - self.heard_at < WINDOW_S
        return not busy and self.own(tick) == NONE


def _add(ticks: Ticks, tick: int, requests: int, tokens: int) -> None:
    entry = ticks.get(tick)
    if entry is None:
        if len(ticks) > WINDOW_TICKS:
            _drop_old(ticks, tick)
        ticks[tick] = [requests, tokens]
    else:
        entry[0] += requests
        entry[1] += tokens


def _drop_old(ticks: Ticks, tick: int) -> None:
    oldest = tick - WINDOW_TICKS
    for old in [each for each in ticks if each < oldest]:
        del ticks[old]


@dataclass(slots=True, eq=False)
class Telling:
    """A report of one subject on its way, until Redis has answered."""

    counts: SubjectCounts
    ticks: Ticks
    periods: dict[str, tuple[int, int]]
    calls: int
    report: Report

    def done(self) -> None:
        """Note that Redis has it."""
        for tick, entry in self.ticks.items():
            self.counts.count_told(tick, *entry)
        for name, (begin, more) in self.periods.items():
            known, value = self.counts.periods.get(name, (begin, 0))
            if known <= begin:
                self.counts.periods[name] = (begin, max(0, more + (value if known == begin else 0)))

    def failed(self) -> None:
        """Note that it must be told again."""
        for tick, entry in self.ticks.items():
            self.counts.count_untold(tick, *entry)
        for name, (begin, more) in self.periods.items():
            self.counts.count_period(name, begin, more)


def tell(counts: SubjectCounts, tick: int, *, all_known: bool, anew: bool) -> Telling:
    """Take what is untold of a subject, to be told. `all_known`: all that is known, since Redis has lost counters;
    `anew`: whether Redis knows no calls of this process any more that are under way."""
    if all_known:
        for when, entry in counts.told.items():
            counts.count_untold(when, *entry)
        counts.told = {}
    _drop_old(counts.untold, tick)
    ticks, periods, counts.untold, counts.untold_periods = counts.untold, counts.untold_periods, {}, {}
    window = " ".join(f"{when} {entry[0]} {entry[1]}" for when, entry in sorted(ticks.items()) if entry != [0, 0])
    known = ""
    if all_known and counts.heard_at and monotonic() - counts.heard_at < WINDOW_S and counts.heard != NONE:
        known = f"{counts.heard_tick} {counts.heard.requests} {counts.heard.tokens}"
    calls = f"={max(0, counts.calls)}" if anew else str(counts.calls - counts.calls_told)
    counts.calls_told = counts.calls
    report = Report(counts.name, calls, known, window, tuple(_period_rows(counts, periods, all_known=all_known)))
    return Telling(counts, ticks, periods, counts.calls, report)


def _period_rows(
    counts: SubjectCounts, untold: Mapping[str, tuple[int, int]], *, all_known: bool
) -> Iterator[tuple[str, int, int, int]]:
    for name, (begin, more) in untold.items():
        known, value = counts.periods.get(name, (begin, 0))
        yield name, begin, value if all_known and known == begin else 0, more
    if all_known:
        yield from ((name, begin, value, 0) for name, (begin, value) in counts.periods.items() if name not in untold)
