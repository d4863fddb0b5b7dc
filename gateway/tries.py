"""The state of one call on its way to a worker, and the interfaces of the parts that help it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.call import Call
from gateway.errors import PaddockError
from gateway.routing.ask import ANYWHERE, Ask, Ranking
from gateway.telemetry.record import Attempt
from gateway.telemetry.standing import Standing
from gateway.telemetry.trail import Trail
from workers.protocol.failures import Failure, FailureCode
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.requests import GenerateRequest

REST_S = 0.1
"""Seconds that a call avoids a worker that refused it."""
LOST_REST_S = 0.5
"""Seconds that a call avoids a worker that lost it: by then its event stream tells whether it is gone."""


class Lease(Protocol):
    """A slot on a worker."""

    @property
    def model(self) -> str: ...
    @property
    def worker(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def queue_ms(self) -> float: ...
    @property
    def ranking(self) -> Ranking: ...
    @property
    def overtaken(self) -> int: ...

    def give_back(self, took: float | None) -> None:
        """Give the slot back: the worker is done with the call. `took`: its tokens; None: as predicted. Never waits."""
        ...


class Admission(Protocol):
    def slot(
        self,
        call: Call,
        avoid: frozenset[str],
        ask: Ask,
        priority: int,
        standing: Standing,
        avoid_now: Callable[[], frozenset[str]],
    ) -> AbstractAsyncContextManager[Lease]: ...

    def predicted_wait_s(self, model: str) -> float:
        """Return the seconds that a call which came now would wait for a slot of the model."""
        ...


class Workers(Protocol):
    @property
    def workers(self) -> Mapping[str, tuple[Heartbeat, ...]]: ...
    @property
    def contents(self) -> Mapping[str, Mapping[str, str]]:
        """Model -> adapter -> SHA-256."""
        ...


class Fleet(Protocol):
    @property
    def snapshot(self) -> Workers: ...


class Connections(Protocol):
    @property
    def any_lost(self) -> bool: ...

    def is_lost(self, boot: str) -> bool:
        """Whether the process is known to be gone though the fleet may still show it."""
        ...


@dataclass(slots=True, eq=False)
class Tries:
    """The state of one call on its way to a worker."""

    call: Call
    """The call, with its current model and those that are left of its chain."""
    trail: Trail
    asked: GenerateRequest | None
    """The request as its caller sent it; None: pooled work."""
    request: GenerateRequest = field(default_factory=GenerateRequest)
    """The request as the current model gets it; empty for pooled work, whose placement depends on nothing of it."""
    ask: Ask = ANYWHERE
    """The placement request: what the choice of a worker depends on."""
    lost: set[str] = field(default_factory=set)
    """Boot ids of the workers that were lost under it, those included that it could not even be told to."""
    resting: dict[str, float] = field(default_factory=dict)
    """Boot id -> time.monotonic() until which this call leaves that worker process alone."""
    with_boot: str = ""
    """Boot id of the process that is to begin the answer; empty: none was asked yet, or it has begun or failed."""
    attempt: Attempt = field(default_factory=Attempt)
    """The attempt at the worker that was asked last, for the call's trace."""
    told: PaddockError | None = None
    """The error of the first model that had no slot for it."""

    def rest(self, boot: str, failure: Failure, now: float) -> None:
        """Let the call avoid that process for a while."""
        self.resting[boot] = float("inf") if failure.code is FailureCode.DRAINING else now + _rest_s(failure.code)


def on_model(call: Call, model: str) -> Call:
    """Return the call with one of its fallbacks; those before it are left out."""
    later = call.fallbacks[call.fallbacks.index(model) + 1 :]
    return replace(call, model=model, fallbacks=later, meant_for=call.meant_for or call.model)


def _rest_s(code: FailureCode) -> float:
    return LOST_REST_S if code is FailureCode.WORKER_LOST else REST_S
