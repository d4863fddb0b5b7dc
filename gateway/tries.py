"""What one call has been through on its way to a worker, and what is asked of those who help it there."""

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
"""How long a worker that refused a call is left alone by that call."""
LOST_REST_S = 0.5
"""The same of one that lost it: by then its event stream tells whether it is gone."""


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
        """The worker is done with the call, which took so many tokens; None: as many as were predicted. Never waits."""
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
        """Of a call that came now, for a slot of the model."""
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
    """What one call has been through."""

    call: Call
    """With the model that it is with now, and those that are left of its chain."""
    trail: Trail
    asked: GenerateRequest | None
    """None: pooled work."""
    request: GenerateRequest = field(default_factory=GenerateRequest)
    """What was asked, as this model is asked for it; of pooled work there is nothing that its place depends on."""
    ask: Ask = ANYWHERE
    """The same as far as its place goes."""
    lost: set[str] = field(default_factory=set)
    """Boot ids of the workers that were lost under it, those that it could not even be told to included."""
    resting: dict[str, float] = field(default_factory=dict)
    """Boot id -> time.monotonic() until which this call leaves that worker process alone."""
    with_boot: str = ""
    """The process that is to begin the answer; empty: none was asked yet, or it has begun or failed."""
    attempt: Attempt = field(default_factory=Attempt)
    """At the worker that was asked last, for the call's trace."""
    told: PaddockError | None = None
    """Why the first model that had no place had none."""

    def rest(self, boot: str, failure: Failure, now: float) -> None:
        """It leaves that process alone for a while."""
        self.resting[boot] = float("inf") if failure.code is FailureCode.DRAINING else now + _rest_s(failure.code)


def on_model(call: Call, model: str) -> Call:
    """The call with one of its fallbacks; those before it are left out."""
    later = call.fallbacks[call.fallbacks.index(model) + 1 :]
    return replace(call, model=model, fallbacks=later, meant_for=call.meant_for or call.model)


def _rest_s(code: FailureCode) -> float:
    return LOST_REST_S if code is FailureCode.WORKER_LOST else REST_S
