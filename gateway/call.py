"""The caller and the deadlines of a request; `workers.protocol.requests` has what is asked, `...events` the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.protocol.heartbeat import WorkerKind


@dataclass(frozen=True, slots=True)
class CallBounds:
    """The limits of a key for each of its calls."""

    min_priority: int = 0
    """The most urgent priority; the lower number is the more urgent one."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: as many as the model's context has room for."""
    answer_timeout_s: float | None = None
    """Most seconds from an answer's first token to its end; None: as the gateway's settings have it."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of an API key. `aliases` is None when the key may use every model."""

    key_id: str
    team: str
    aliases: frozenset[str] | None
    admin: bool
    weight: float = 1.0
    """Share of its team, beside those of other teams, while calls wait."""
    bounds: CallBounds = CallBounds()

    def may_use(self, alias: str) -> bool:
        return self.aliases is None or alias in self.aliases


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way through the gateway: immutable, made by `Pipeline.call`."""

    request_id: str
    principal: Principal
    alias: str
    """The name the caller used."""
    model: str
    """The pool that serves it."""
    received_at: float
    """time.monotonic() when the request arrived."""
    deadline: float
    """time.monotonic() after which nobody waits for the answer any more."""
    queue_deadline: float
    """time.monotonic() after which the call stops waiting for a slot."""
    start_deadline: float = 0.0
    """time.monotonic() until which it waits for its model's first worker (then for a slot); 0: as `queue_deadline`."""
    begin_by: float = 0.0
    """Unix time by which the caller would like the answer to have begun; 0: it did not say."""
    adapter: str = ""
    """The LoRA adapter that was called by its name."""
    kind: WorkerKind | None = None
    """The work that the model must be able to do; None: what any model can."""
    fallbacks: tuple[str, ...] = ()
    """Pools that stand in for `model`, in this order, until the answer has begun."""
    meant_for: str = ""
    """The pool that `model` stands in for; empty: none."""
    session: str = ""
    """A newer call of the same key and session ends this one; empty: none does."""
    unhurried: bool = False
    """Nobody waits for the answer: it may stay in line until its deadline."""

    def waiting(self, now: float, *, queue_s: float, start_s: float) -> Call:
        """Return the call with new waits from `now` on: for a slot, for a first worker; never beyond its deadline."""
        if self.unhurried:
            return replace(self, queue_deadline=self.deadline, start_deadline=self.deadline)
        queue_deadline, start_deadline = min(self.deadline, now + queue_s), min(self.deadline, now + start_s)
        return replace(self, queue_deadline=queue_deadline, start_deadline=start_deadline)
