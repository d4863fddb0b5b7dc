"""The result of a run as one JSON document. Later versions only add fields; `docs/bench.md` lists them."""

from __future__ import annotations

from msgspec import Struct, field

SCHEMA = 1


class Spread(Struct, frozen=True):
    """The distribution of one quantity in the measured time. Percentiles are nearest-rank: each is a measured value."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Calls(Struct, frozen=True):
    """Numbers of calls in the measured time, except `warmup`: the number of calls in the warm-up."""

    sent: int = 0
    finished: int = 0
    """Calls with a complete answer."""
    failed: int = 0
    unfinished: int = 0
    """Calls still running when the run was interrupted; they are neither `finished` nor `failed`."""
    warmup: int = 0


class Rates(Struct, frozen=True):
    """Rates per second in the measured time."""

    sent_per_s: float = 0.0
    finished_per_s: float = 0.0
    """Answers that ended in the measured time, per second."""
    tokens_per_s: float = 0.0
    """Tokens of answers that arrived in the measured time, per second."""
    prompt_tokens_per_s: float = 0.0
    in_flight_mean: float = 0.0


class Tokens(Struct, frozen=True):
    """The tokens of finished calls, as the server counts them."""

    prompt: int = 0
    cached: int = 0
    cached_share: float | None = None
    """Share of prompt tokens that were cached, in calls for which the server reports it; null: it reports none."""
    generated: int = 0
    pieces: int = 0
    """Events that carry text; an event can carry several tokens."""


class Queue(Struct, frozen=True):
    """The server's queue, if the server reports positions in it (`x-queue-position`)."""

    told: int = 0
    """Calls for which the server reported a position."""
    waited: int = 0
    """Calls among `told` that did not get a slot at once."""
    position: Spread = Spread()
    """First queue position of the calls that waited."""
    predicted_wait_s: Spread = Spread()


class Goodput(Struct, frozen=True):
    """The calls that met every bound of `--slo`."""

    slo: str = ""
    share: float = 0.0
    """Number of calls that met every bound, divided by the number of calls that finished or failed."""
    per_s: float = 0.0


class Group(Struct, frozen=True):
    """The results of one team: the calls of one key."""

    finished: int = 0
    failed: int = 0
    generated: int = 0
    ttft_s: Spread = Spread()
    e2e_s: Spread = Spread()


class Generator(Struct, frozen=True):
    """The load generator's own load. If it was `saturated`, the results measure the generator, not the server."""

    cpu_share: float = 0.0
    """The generator's CPU time as a share of one core."""
    cpu_us_per_piece: float = 0.0
    """The generator's CPU time in microseconds, including that for making requests, per piece of an answer."""
    late_s: Spread = Spread()
    """Seconds from when calls were due until they were sent. All waits count from when a call was due."""
    loop_lag_s: Spread = Spread()
    saturated: bool = False


class Second(Struct, frozen=True):
    """One interval of the run: a second, or more in long runs. `at_s`: its start, in seconds from the run's start."""

    at_s: float
    tokens_per_s: float
    in_flight: float
    finished: int
    failed: int


class Step(Struct, frozen=True):
    """One step of a search for the limit: a run at one rate."""

    rate: float
    held: bool
    why: str
    """The bounds that were broken; empty: all held."""
    sent: int
    ttft_p95_s: float
    itl_p95_s: float
    tokens_per_s: float


class Limit(Struct, frozen=True):
    """The result of a search. `sustainable_rate`: highest rate, in calls per second, at which all objectives held; 0:
    they held at no rate."""

    objectives: str
    sustainable_rate: float
    steps: tuple[Step, ...]


class Verdict(Struct, frozen=True):
    expression: str
    value: float | None
    """The measured value; null: nothing was measured, and the bound counts as broken."""
    held: bool


class Document(Struct, frozen=True):
    """The whole result. Times are in seconds. `curves`: percentiles 0 to 100 of `ttft_s`, of `itl_s` and of `e2e_s`."""

    schema: int
    version: str
    """Version of Paddock."""
    started_at: str
    """ISO 8601, UTC."""
    ended: str
    """`done` or `interrupted`."""
    settings: dict[str, str | float | int | bool | None]
    """The flags of the run, without API keys."""
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
    """A call's mean time per token after the first."""
    e2e_s: Spread
    """Time from when the call was due to the end of its answer."""
    queue: Queue
    goodput: Goodput | None
    errors: dict[str, int]
    """Kind of error -> number of calls."""
    error_details: dict[str, str]
    """Kind of error -> text of its first occurrence."""
    teams: dict[str, Group]
    generator: Generator
    limit: Limit | None = None
    asserts: tuple[Verdict, ...] = ()
    series: tuple[Second, ...] = ()
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
