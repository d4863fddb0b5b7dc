"""One call of the gateway: who asks, until when, and what ends it early. `workers.protocol` has what is asked for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from gateway.errors import PaddockError, RequestTimeout
from workers.protocol.events import CallEvent, Failed, Finished
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
    held_bytes: int = 0
    """Most memory that its decoded body takes: the cost of going through it grows with that."""
    unhurried: bool = False
    """Nobody waits for the answer: it may stay in line until its deadline."""

    def waiting(self, now: float, *, queue_s: float, start_s: float) -> Call:
        """Return the call with new waits from `now` on: for a slot, for a first worker; never beyond its deadline."""
        if self.unhurried:
            return replace(self, queue_deadline=self.deadline, start_deadline=self.deadline)
        queue_deadline, start_deadline = min(self.deadline, now + queue_s), min(self.deadline, now + start_s)
        return replace(self, queue_deadline=queue_deadline, start_deadline=start_deadline)

    def on_model(self, model: str) -> Call:
        """Return the call with one of its fallbacks; those before it are left out."""
        later = self.fallbacks[self.fallbacks.index(model) + 1 :]
        return replace(self, model=model, fallbacks=later, meant_for=self.meant_for or self.model)


class Answer(Protocol):
    """The events of one or several answers to a request that have begun."""

    @property
    def ended(self) -> bool:
        """Whether the last event of every answer has been taken."""
        ...

    @property
    def choice(self) -> int:
        """Number of the answer that the last `take` was about."""
        ...

    @property
    def end(self) -> Finished | Failed | None:
        """The last event that was taken, if it ended an answer."""
        ...

    async def take(self) -> list[CallEvent]:
        """Wait for events of one answer, and return those since the last time, at least one. The last list of each
        answer ends in `Finished` or `Failed`.
        """
        ...


class Cutoff:
    """A block that can be interrupted: `cut(error)` stops whatever it waits for, and the block ends with that error."""

    def __init__(self, deadline: float, limit: str) -> None:
        """`deadline` is a time.monotonic() after which the block ends by itself, because of `limit`."""
        self._when = asyncio.get_running_loop().time() + deadline - time.monotonic()
        self._timeout: asyncio.Timeout | None = None
        """Set while the block runs. It refers to the task, and so to its exception and all of its frames: kept longer,
        it would leave a call that was cut off to the garbage collector."""
        self._limit = limit
        self._error: PaddockError | None = None

    def limit(self, within_s: float, limit: str) -> None:
        """End the block `within_s` from now, because of `limit`, unless it ends sooner. Only within the block."""
        when = asyncio.get_running_loop().time() + within_s
        if self._timeout is not None and self._error is None and not self._timeout.expired() and when < self._when:
            self._when, self._limit = when, limit
            self._timeout.reschedule(when)

    def cut(self, error: PaddockError) -> None:
        """Interrupt the block with an error. Never waits; only the first counts, and none after the block has ended."""
        if self._timeout is not None and self._error is None and not self._timeout.expired():
            self._error = error
            self._timeout.reschedule(0)

    async def __aenter__(self) -> None:
        self._timeout = await asyncio.timeout_at(self._when).__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            raise RuntimeError("left without being entered")
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._error or RequestTimeout(
                f"The request passed {self._limit}. Ask for fewer tokens or raise the limit."
            ) from None
