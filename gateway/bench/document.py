"""The result of a run as one JSON document. Fields are only ever added; `docs/bench.md` lists them."""

from __future__ import annotations

from msgspec import Struct, field

SCHEMA = 1


class Spread(Struct, frozen=True):
    """The distribution of one quantity over the measured time. Percentiles are by nearest rank."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Calls(Struct, frozen=True):
    """The calls of the measured time; only `warmup` counts those of the warm-up."""

    sent: int = 0
    finished: int = 0
    """Calls that were answered as they should be."""
    failed: int = 0
    unfinished: int = 0
    """Calls that were left because the run was interrupted; they count neither as finished nor as failed."""
    warmup: int = 0


class Rates(Struct, frozen=True):
    """The rates per second of the measured time."""

    sent_per_s: float = 0.0
    finished_per_s: float = 0.0
    """Answers that ended in the measured time."""
    tokens_per_s: float = 0.0
    """Tokens of answers that came in the measured time."""
    prompt_tokens_per_s: float = 0.0
    in_flight_mean: float = 0.0


class Tokens(Struct, frozen=True):
    """The tokens of finished calls, as the server counts them."""

    prompt: int = 0
    cached: int = 0
    cached_share: float | None = None
    """Share of prompt tokens that were cached, in calls for which the server tells; null where it never does."""
    generated: int = 0
    pieces: int = 0
    """Events with text; several tokens can come in one."""


class Queue(Struct, frozen=True):
    """The server's queue, where the server tells of it (`x-queue-position`)."""

    told: int = 0
    """Calls for which the server told the position."""
    waited: int = 0
    """Calls among those that did not get a slot at once."""
    position: Spread = Spread()
    """First queue position of the calls that waited."""
    predicted_wait_s: Spread = Spread()


class Goodput(Struct, frozen=True):
    """Calls that met every bound of `slo`."""

    slo: str = ""
    share: float = 0.0
    """Share of all calls that finished or failed."""
    per_s: float = 0.0


class Group(Struct, frozen=True):
    """The results of one team: the calls of one key."""

    finished: int = 0
    failed: int = 0
    generated: int = 0
    ttft_s: Spread = Spread()
    e2e_s: Spread = Spread()


class Generator(Struct, frozen=True):
    """The load generator's own cost. Where it was saturated, the figures are its own, not the server's."""

    cpu_share: float = 0.0
    """CPU time as a share of one core."""
    cpu_us_per_piece: float = 0.0
    """All its CPU time, making requests included, per piece of an answer."""
    late_s: Spread = Spread()
    """Delay between when calls were due and when they were sent; waits count from when they were due."""
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
    """One step of a search for the limit."""

    rate: float
    held: bool
    why: str
    """The bounds that broke; empty where all held."""
    sent: int
    ttft_p95_s: float
    itl_p95_s: float
    tokens_per_s: float


class Limit(Struct, frozen=True):
    """The result of a search. `sustainable_rate`: the most calls per second at which the objectives held; 0: none."""

    objectives: str
    sustainable_rate: float
    steps: tuple[Step, ...]


class Verdict(Struct, frozen=True):
    expression: str
    value: float | None
    """The measured value; null: nothing was measured, which breaks it."""
    held: bool


class Document(Struct, frozen=True):
    """The whole result. Times are in seconds. `curves`: percentiles 0 to 100 of each of `ttft_s`, `itl_s`, `e2e_s`."""

    schema: int
    version: str
    """Version of Paddock."""
    started_at: str
    """ISO 8601, UTC."""
    ended: str
    """`done` or `interrupted`."""
    settings: dict[str, str | float | int | bool | None]
    """The flags of the run; no key is among them."""
    warmup_s: float
    measured_s: float
    calls: Calls
    rates: Rates
    tokens: Tokens
    ttft_s: Spread
    """Time from when the call was due to the first piece of its answer."""
    itl_s: Spread
    """Time between two pieces of an answer."""
    tpot_s: Spread
    """Mean time of a call's tokens after the first."""
    e2e_s: Spread
    """Time from when the call was due to the end of its answer."""
    queue: Queue
    goodput: Goodput | None
    errors: dict[str, int]
    """Kind of error -> number of calls."""
    error_details: dict[str, str]
    """Kind of error -> text of the first one."""
    teams: dict[str, Group]
    generator: Generator
    limit: Limit | None = None
    asserts: tuple[Verdict, ...] = ()
    series: tuple[Second, ...] = ()
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
