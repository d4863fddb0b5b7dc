"""The metrics of this gateway process, as `workers.protocol.metrics.of_gateway` declares them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway import __version__
from gateway.telemetry.gen_ai import GenAi
from gateway.telemetry.trail import Trail
from workers.protocol.metrics import catalogue, of_gateway
from workers.protocol.metrics.book import Book
from workers.protocol.metrics.process import Process
from workers.protocol.metrics.who import FAILED_BY, OTHER, Who, blamed

OK = "ok"
WATCHED = (
    *((who, code) for code, who in FAILED_BY.items() if who in (Who.WORKER, Who.GATEWAY)),
    (Who.GATEWAY, OTHER),
    *((Who.POLICY, code) for code in ("queue_full", "queue_timeout")),
)
"""Failures that alerts watch."""


class Metrics:
    """All metrics. They are updated once per request, never per token. One thread counts; `book` renders in any."""

    def __init__(self) -> None:
        book = self.book = Book(catalogue.metrics_of(catalogue.GATEWAY))
        self.requests = book.counter(of_gateway.REQUESTS)
        self.failures = book.counter(of_gateway.FAILURES)
        self.in_flight = book.gauge(of_gateway.IN_FLIGHT)
        self.ttft = book.histogram(of_gateway.TTFT)
        self.e2e = book.histogram(of_gateway.E2E)
        self.time_per_token = book.histogram(of_gateway.TIME_PER_TOKEN)
        self.overhead = book.histogram(of_gateway.OVERHEAD)
        self.prompt_tokens = book.counter(of_gateway.PROMPT_TOKENS)
        self.cached_tokens = book.counter(of_gateway.CACHED_TOKENS)
        self.generated_tokens = book.counter(of_gateway.GENERATED_TOKENS)
        self.ignored = book.counter(of_gateway.IGNORED)
        self.queue_wait = book.histogram(of_gateway.QUEUE_WAIT)
        self.wait_error = book.histogram(of_gateway.WAIT_ERROR)
        self.team_queue = book.counter(of_gateway.TEAM_QUEUE)
        self.placements = book.counter(of_gateway.PLACEMENTS)
        self.overtaken = book.counter(of_gateway.OVERTAKEN)
        self.attempts = book.counter(of_gateway.ATTEMPTS)
        self.retries = book.counter(of_gateway.RETRIES)
        self.fallbacks = book.counter(of_gateway.FALLBACKS)
        self.unknown_models = book.counter(of_gateway.UNKNOWN_MODELS)
        self.circuits_opened = book.counter(of_gateway.CIRCUITS_OPENED)
        self.worker_starts = book.counter(of_gateway.WORKER_STARTS)
        self.worker_losses = book.counter(of_gateway.WORKER_LOSSES)
        self.leases_lost = book.counter(of_gateway.LEASES_LOST)
        self.refused_records = book.counter(of_gateway.REFUSED_RECORDS)
        for kind in of_gateway.REFUSED_KINDS:
            self.refused_records.inc(kind, by=0)
        self.redis_time = book.histogram(of_gateway.REDIS_TIME)
        self.unreadable = book.counter(of_gateway.UNREADABLE)
        for kind in of_gateway.Unread:
            self.unreadable.inc(kind.value, by=0)
        self.beyond = book.counter(of_gateway.BEYOND)
        for reason in of_gateway.BEYOND_REASONS:
            self.beyond.inc(reason, by=0)
        self.loop_lag = book.histogram(of_gateway.LOOP_LAG)
        self.now = Gauges(book)
        self._gen_ai = GenAi(book)
        book.gauge(of_gateway.BUILD_INFO).set(1, __version__)
        self.process = Process(book)
        self._announced = set[str]()

    def announce(self, models: Iterable[str]) -> None:
        """Set these models' failure counters to 0: a series that begins with its first event does not rise by it."""
        for model in models:
            if model in self._announced:
                continue
            self._announced.add(model)
            for who, code in WATCHED:
                self.failures.inc(model, who, code, by=0)
            self.worker_starts.inc(model, by=0)
            for how in of_gateway.LOSSES:
                self.worker_losses.inc(model, how, by=0)
            for why in of_gateway.LEASE_ENDS:
                self.leases_lost.inc(model, why, by=0)

    def ended(self, trail: Trail, total_s: float) -> None:
        """Count one request that reached a model. One that only asks about the model is not in the time histograms."""
        model, outcome = trail.model, self._outcome(trail)
        who = (model, trail.alias, trail.team)
        self.requests.inc(*who, outcome)
        for parameter in trail.ignored.labels:
            self.ignored.inc(parameter)
        if trail.asks_only:
            return
        self.e2e.observe(total_s, model)
        if trail.attempts or trail.queue_ms:
            queue_s = trail.queue_ms / 1e3
            self.queue_wait.observe(queue_s, model)
            self.team_queue.inc(model, trail.team, by=queue_s)
        if trail.attempts:
            self.overhead.observe(trail.overhead_ms / 1e3, model)
            self._placed(trail)
        ttft_s, token_s = trail.ttft_s, None
        if ttft_s is not None:
            self.ttft.observe(ttft_s, model)
        if (usage := trail.usage) is not None:
            self.prompt_tokens.inc(*who, by=usage.prompt_tokens)
            self.cached_tokens.inc(*who, by=usage.cached_tokens)
            self.generated_tokens.inc(*who, by=usage.completion_tokens)
            # Parallel answers have no common time per token, and one that was cut off may have stalled before.
            is_whole = outcome == OK and trail.num_answers == 1
            if ttft_s is not None and usage.completion_tokens > 1 and is_whole:
                token_s = max(0.0, total_s - ttft_s) / (usage.completion_tokens - 1)
                self.time_per_token.observe(token_s, model)
        self._gen_ai.ended(trail, "" if outcome == OK else outcome, total_s, token_s)

    def turned_away(self, trail: Trail) -> None:
        """Count one request that ended before it had a model: its labels `model` and `alias` are empty."""
        self.requests.inc("", "", trail.team, self._outcome(trail))

    def lost_leases(self, model: str, why: str, count: int) -> None:
        """Count lost leases. `why`: one of `of_gateway.LEASE_ENDS`."""
        self.leases_lost.inc(model, why, by=count)

    def _outcome(self, trail: Trail) -> str:
        """Count a failure, and return the request's outcome as one of the declared labels."""
        if trail.outcome == OK:
            return OK
        who, code = blamed(trail.outcome)
        self.failures.inc(trail.model, who, code)
        return code if code == OTHER else trail.outcome

    def _placed(self, trail: Trail) -> None:
        if trail.expected_cached is not None:
            self.placements.inc(trail.model, "cached" if trail.expected_cached else "uncached")
        if trail.overtaken:
            self.overtaken.inc(trail.model, by=trail.overtaken)
        if trail.standing.predicted_s is not None and trail.attempts == 1:
            self.wait_error.observe(abs(trail.queue_ms / 1e3 - trail.standing.predicted_s), trail.model)


class Gauges:
    """The gauges, which are set just before somebody reads them."""

    def __init__(self, book: Book) -> None:
        self.queue_length = book.gauge(of_gateway.QUEUE_LENGTH)
        self.queue_oldest = book.gauge(of_gateway.QUEUE_OLDEST)
        self.predicted_wait = book.gauge(of_gateway.PREDICTED_WAIT)
        self.workers = book.gauge(of_gateway.WORKERS)
        self.workers_draining = book.gauge(of_gateway.WORKERS_DRAINING)
        self.slots = book.gauge(of_gateway.SLOTS)
        self.slots_busy = book.gauge(of_gateway.SLOTS_BUSY)
        self.leases = book.gauge(of_gateway.LEASES)
        self.circuits = book.gauge(of_gateway.CIRCUITS)
        self.without_redis = book.gauge(of_gateway.WITHOUT_REDIS)
        self.redis_up = book.gauge(of_gateway.REDIS_UP)
        self.connections = book.gauge(of_gateway.CONNECTIONS)
        self.sockets = book.gauge(of_gateway.SOCKETS)
        self.stopping = book.gauge(of_gateway.STOPPING)
