"""Decides about retries: circuit breakers of workers, a model's retry budget, and fallback chains. Pure.

A worker process that fails call after call gets no calls for a while (its circuit is open), then one trial call:

closed     FAILURES in a row within WINDOW_S      -> open
open       its pause is over                      -> half open: one call may try it
half open  the answer to the trial call begins    -> closed, on trial: one more failure opens it
           the trial call fails                   -> open, for twice as long
closed     an answer is complete                  -> as new

Times are seconds by the caller's clock. `uniform` is a random number from 0 to 1, so that gateways do not all try a
worker at the same time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

FAILURES = 3
WINDOW_S = 30.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
JITTER = 0.2
"""Maximum part of a circuit's pause by which the pause is made longer or shorter, at random."""
FORGOTTEN_S = 600.0
"""A process counts as new this many seconds after its last failure or, if that is later, after the end of its pause.
This also removes the circuits of processes that are gone."""


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Circuit:
    """The circuit breaker of one worker process at one gateway."""

    failed_at: tuple[float, ...] = ()
    """Times of the consecutive failures that still count, oldest first."""
    open_until: float | None = None
    """Time at which a trial call is allowed; None: the circuit is closed."""
    pause_s: float = 0.0
    """Length of the last pause, without its jitter; 0: there was no pause."""

    def state(self, now: float) -> State:
        if self.open_until is None:
            return State.CLOSED
        return State.OPEN if now < self.open_until else State.HALF_OPEN

    def after_failure(self, now: float, uniform: float) -> Circuit:
        """Return what the circuit becomes when a call has failed by the worker's fault."""
        state = self.state(now)
        failed_at = (*(at for at in self.failed_at if now - at < WINDOW_S), now)[-FAILURES:]
        if state is State.OPEN or (state is State.CLOSED and len(failed_at) < FAILURES):
            return replace(self, failed_at=failed_at)
        pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s or FIRST_PAUSE_S)
        return Circuit(failed_at, now + pause_s * (1 - JITTER + 2 * JITTER * uniform), pause_s)

    def after_begin(self, now: float) -> Circuit:
        """Return what the circuit becomes when an answer has begun."""
        if self.state(now) is not State.HALF_OPEN:
            return self
        return Circuit((now,) * (FAILURES - 1), None, self.pause_s)

    def after_completion(self, now: float) -> Circuit:
        """Return what the circuit becomes when an answer is complete: a new one, as if nothing had failed. An open
        circuit stays as it is, since the call was sent before it opened."""
        return self if self.state(now) is State.OPEN else Circuit()


@dataclass(frozen=True, slots=True)
class CircuitStatus:
    """The state of one circuit with recent failures, for operators."""

    state: State
    failures: int
    """Number of consecutive failures within WINDOW_S."""
    tried_in_s: float
    """Seconds until a trial call is allowed; 0 if calls, or a trial call, are allowed now."""


class Circuits:
    """The circuits of all worker processes at one gateway, by boot id. At most one trial call runs at each process."""

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self._uniform = uniform
        self._circuits: dict[str, Circuit] = {}
        self._trials: dict[str, Hashable] = {}
        """Boot id -> the trial call at that process."""

    @property
    def all_new(self) -> bool:
        """Whether no process has failed lately, so that each one may get calls."""
        return not self._circuits

    def admits(self, boot: str, call: Hashable, now: float, *, going: bool = True) -> bool:
        """Return whether the call may be sent to the process. `going`: whether the caller will then send it; False: the
        caller only wants to know. If the circuit is half open, the call that is sent becomes the trial call. No other
        call may be sent until the trial call's answer begins, or the trial call fails or is over (`end_trials`)."""
        circuit = self._circuits.get(boot)
        state = State.CLOSED if circuit is None else circuit.state(now)
        if state is not State.HALF_OPEN:
            return state is State.CLOSED
        return (self._trials.setdefault(boot, call) if going else self._trials.get(boot, call)) is call

    def end_trials(self, call: Hashable, but: str = "") -> None:
        """Stop treating the call as the trial call of any process, except of the process `but`."""
        for boot in [boot for boot, trying in self._trials.items() if trying is call and boot != but]:
            del self._trials[boot]

    def note_failure(self, boot: str, now: float) -> float:
        """Record a failure. Return the seconds for which it opens the circuit; 0 if it does not open it."""
        self._forget(now)
        before = self._circuits.get(boot, Circuit())
        after = self._circuits[boot] = before.after_failure(now, self._uniform())
        self._trials.pop(boot, None)
        if after.open_until is None or after.open_until == before.open_until:
            return 0.0
        return after.open_until - now

    def note_begin(self, boot: str, now: float) -> None:
        circuit = self._circuits.get(boot)
        if circuit is not None:
            self._circuits[boot] = circuit.after_begin(now)
            self._trials.pop(boot, None)

    def note_completion(self, boot: str, now: float) -> None:
        circuit = self._circuits.get(boot)
        if circuit is None:
            return
        after = circuit.after_completion(now)
        if after == Circuit():
            del self._circuits[boot]
            self._trials.pop(boot, None)

    def states(self, now: float) -> Mapping[str, CircuitStatus]:
        """Return boot id -> state of its circuit, for processes that have failed lately."""
        return MappingProxyType(
            {
                boot: CircuitStatus(
                    circuit.state(now),
                    sum(now - at < WINDOW_S for at in circuit.failed_at),
                    max(0.0, (circuit.open_until or now) - now),
                )
                for boot, circuit in self._circuits.items()
            }
        )

    def _forget(self, now: float) -> None:
        for boot, circuit in list(self._circuits.items()):
            if now - max(circuit.failed_at[-1], circuit.open_until or 0.0) > FORGOTTEN_S:
                del self._circuits[boot]
                self._trials.pop(boot, None)


BUDGET_WINDOW_S = 10
FLOOR = 10
"""Number of retries within the window that are always allowed, so that a quiet fleet loses no call when one worker
ends."""


@dataclass(slots=True)
class _Second:
    number: int
    calls: int = 0
    retries: int = 0


class RetryBudget:
    """The retry budgets of one gateway, by model. Times are seconds by the caller's clock, which must not go back."""

    def __init__(self, share: float) -> None:
        """`share`: part of the calls of the last BUDGET_WINDOW_S seconds that may be retries, in addition to FLOOR
        retries."""
        self._share = share
        self._seconds: dict[str, deque[_Second]] = {}

    def count_call(self, model: str, now: float) -> None:
        """Count a new call of the model."""
        self._now(model, now).calls += 1

    def take(self, model: str, now: float) -> bool:
        """Return whether one more call may be tried again; if it may, count the retry."""
        second = self._now(model, now)
        seconds = self._seconds[model]
        allowed = FLOOR + self._share * sum(each.calls for each in seconds)
        if sum(each.retries for each in seconds) + 1 > allowed:
            return False
        second.retries += 1
        return True

    def _now(self, model: str, now: float) -> _Second:
        seconds = self._seconds.setdefault(model, deque(maxlen=BUDGET_WINDOW_S))
        number = int(now)
        while seconds and seconds[0].number <= number - BUDGET_WINDOW_S:
            seconds.popleft()
        if not seconds or seconds[-1].number != number:
            seconds.append(_Second(number))
        return seconds[-1]


class Reason(StrEnum):
    """The reasons why a call moved on to another model of its fallback chain."""

    NO_WORKER = "no_worker"
    """No worker is suitable: each is gone, draining, of another kind, without the adapters, or has an open circuit."""
    WAIT = "wait"
    """The predicted wait is longer than the caller is willing to wait."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NOT_LOADED = "model_not_loaded"
    """No machine can load the model now."""
    UNSUITED = "unsuited"
    """The model is a fallback and can't do what the call asks for."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How soon one model of a fallback chain could serve one call."""

    model: str
    ready: bool
    """Whether the model has a suitable worker."""
    wait_s: float
    """Predicted seconds until a slot is free."""


def choose_model(outlooks: Iterable[Outlook], patience_s: float) -> Outlook | None:
    """Return the first model of a fallback chain that is ready within `patience_s` seconds, or else the ready model
    with the shortest wait; None if no model is ready. `outlooks` come in the order of the chain, and are read only as
    far as the first model that is ready in time."""
    late: list[Outlook] = []
    for outlook in outlooks:
        if outlook.ready and outlook.wait_s <= patience_s:
            return outlook
        if outlook.ready:
            late.append(outlook)
    return min(late, key=lambda outlook: outlook.wait_s, default=None)
