"""The result of a run as one JSON document. Fields are only ever added; `docs/bench.md` lists them."""

from __future__ import annotations

from msgspec import Struct, field

SCHEMA = 1


class Spread(Struct, frozen=True):
    """Of one quantity, over all that was measured. Percentiles are by nearest rank."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Calls(Struct, frozen=True):
    """Of the measured time; warm-up is counted in `warmup` alone."""

    sent: int = 0
    finished: int = 0
    """Answered as they should be."""
    failed: int = 0
    unfinished: int = 0
    """Left because the run was interrupted: in neither of the two before."""
    warmup: int = 0


class Rates(Struct, frozen=True):
    """Per second of the measured time."""

    sent_per_s: float = 0.0
    finished_per_s: float = 0.0
    """Answers that ended in the measured time."""
    tokens_per_s: float = 0.0
    """Of answers, as they came."""
    prompt_tokens_per_s: float = 0.0
    in_flight_mean: float = 0.0


class Tokens(Struct, frozen=True):
    """Of finished calls, as the server counts."""

    prompt: int = 0
    cached: int = 0
    cached_share: float | None = None
    """Of the prompts of those calls for which the server tells; null where it never does."""
    generated: int = 0
    pieces: int = 0
    """Events with text; several tokens can come in one."""


class Queue(Struct, frozen=True):
    """Where the server tells of its queue (`x-queue-position`)."""

    told: int = 0
    """Calls for which it did."""
    waited: int = 0
    """Of those, calls that did not get a slot at once."""
    position: Spread = Spread()
    """Of those that waited, where they stood at first."""
    predicted_wait_s: Spread = Spread()


class Goodput(Struct, frozen=True):
    """Calls that met every bound of `slo`."""

    slo: str = ""
    share: float = 0.0
    """Of all that finished or failed."""
    per_s: float = 0.0


class Group(Struct, frozen=True):
    """One team: the calls of one key."""

    finished: int = 0
    failed: int = 0
    generated: int = 0
    ttft_s: Spread = Spread()
    e2e_s: Spread = Spread()


class Generator(Struct, frozen=True):
    """What asking cost. Where it was saturated the figures are of the generator, not of the server."""

    cpu_share: float = 0.0
    """Of one core."""
    cpu_us_per_piece: float = 0.0
    """All its CPU time, requests' making included, by pieces of answers."""
    late_s: Spread = Spread()
    """How much later than due calls were sent; their waits count from when they were due."""
    loop_lag_s: Spread = Spread()
    saturated: bool = False


class Second(Struct, frozen=True):
    """One interval of the run, `at_s` after its beginning."""

    at_s: float
    tokens_per_s: float
    in_flight: int
    finished: int
    failed: int


class Step(Struct, frozen=True):
    """Of a search for the limit."""

    rate: float
    held: bool
    why: str
    """What broke; empty where it held."""
    sent: int
    ttft_p95_s: float
    itl_p95_s: float
    tokens_per_s: float


class Limit(Struct, frozen=True):
    """`sustainable_rate`: calls per second, the highest at which the objectives held; 0: none did."""

    objectives: str
    sustainable_rate: float
    steps: tuple[Step, ...]


class Verdict(Struct, frozen=True):
    expression: str
    value: float | None
    """null: nothing was measured, which breaks it."""
    held: bool


class Document(Struct, frozen=True):
    """Times in seconds. `curves`: for each of `ttft_s`, `itl_s`, `e2e_s` its percentiles 0 to 100."""

    schema: int
    version: str
    """Of Paddock."""
    started_at: str
    """ISO 8601, UTC."""
    ended: str
    """`done` or `interrupted`."""
    settings: dict[str, str | float | int | bool | None]
    """What was asked for; no key is among it."""
    warmup_s: float
    measured_s: float
    calls: Calls
    rates: Rates
    tokens: Tokens
    ttft_s: Spread
    """From when the call was due to the first piece of its answer."""
    itl_s: Spread
    """Between pieces of an answer."""
    tpot_s: Spread
    """Mean time of a call's tokens after the first."""
    e2e_s: Spread
    """From when the call was due to the end of its answer."""
    queue: Queue
    goodput: Goodput | None
    errors: dict[str, int]
    """By kind."""
    error_details: dict[str, str]
    """What the first of each kind said."""
    teams: dict[str, Group]
    generator: Generator
    limit: Limit | None = None
    asserts: tuple[Verdict, ...] = ()
    series: tuple[Second, ...] = ()
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
