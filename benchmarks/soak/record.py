"""All that a soak has measured, as values that know nothing of the fleet: a verdict is reached of these alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.soak.storage import Stock
from benchmarks.soak.subjects import Sample, Subject

WARM, FIRST = 0.2, 0.35
"""Shares of the time: warming up, and load with every fault; the rest is load with those that restart nothing."""
KEPT_ALIVE_S = 32.0
"""After so long, idle connections of gateways to workers are closed."""
SETTLE_SHARE = 0.02
FILLED_S = 900.0
NUM_ROUNDS, MIN_ROUND_S = 24, 8.0
NUM_FAULTS = 45
"""In all, but no closer than `LEAST_GAP_S`."""
LEAST_GAP_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    total_s: float
    """Of load; filling caches comes on top."""
    rate: float
    """Deeds of callers per second."""
    seed: int

    @property
    def warm_s(self) -> float:
        """A process that was restarted has as long to warm up as the fleet."""
        return self.total_s * WARM

    @property
    def sample_s(self) -> float:
        """Between two samples."""
        return min(5.0, max(1.0, self.total_s / 240))

    @property
    def filling(self) -> float:
        """How much is done to fill caches: all of it in a quarter of an hour and longer."""
        return min(1.0, self.total_s / FILLED_S)

    @property
    def round_s(self) -> float:
        """Load between two rests."""
        return max(MIN_ROUND_S, self.total_s / NUM_ROUNDS)

    @property
    def settle_s(self) -> float:
        """How long the three long rests go on when nothing is held any more."""
        return min(KEPT_ALIVE_S, self.total_s * SETTLE_SHARE)

    @property
    def fault_gap_s(self) -> float:
        return max(LEAST_GAP_S, self.total_s / NUM_FAULTS)


@dataclass(frozen=True, slots=True)
class Rest:
    """What there was when nobody called."""

    at_s: float
    took_s: float
    """Until nothing was held, or as long as was waited for that."""
    is_long: bool
    """Idle connections had time to close."""
    held: dict[str, int]
    """Leases and tickets by family."""
    busy: dict[str, float]
    """Name of a process -> calls that it says it has."""
    breaches: list[str]
    """Of the data of admission."""
    stock: Stock
    samples: dict[str, Sample]
    pids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault, and why it could not be done, if so."""

    at_s: float
    fault: str
    failure: str


@dataclass(slots=True)
class Record:
    """Times are seconds since the start."""

    plan: Plan
    names: tuple[str, ...] = ()
    """Processes that have to be there all the time."""
    subjects: dict[str, Subject] = field(default_factory=dict)
    stocks: list[Stock] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    warm_at_s: float = 0.0
    """From then on it counts."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """From when to when there was load, without the fillings of caches before and between."""
    faults: list[Struck] = field(default_factory=list)
    endings: dict[str, Counter[str]] = field(default_factory=dict)
    """Deed -> `ok`, a code, `broken` or `surprise` -> how often."""
    surprises: list[str] = field(default_factory=list)
    """The first ones, in words."""
    num_surprises: int = 0
    num_deeds: int = 0
    turned_away: int = 0
    """Callers who did not come, because too many were there."""
    exits: dict[str, int] = field(default_factory=dict)
    """Exit codes of what was asked to stop, by name."""
    leftovers: dict[str, int] = field(default_factory=dict)
    """Families of keys that were still there when everybody had ended."""
    orphans: list[str] = field(default_factory=list)
    """Command lines of processes that ought to have ended."""
