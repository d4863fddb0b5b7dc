"""Leaving a worker process alone that fails call after call, and trying it again after a while. Pure.

closed     FAILURES in a row within WINDOW_S      -> open
open       its pause is over                      -> half open: one call may try it
half open  the answer to that call begins         -> closed, on trial: one more failure opens it
           that call fails                        -> open, for twice as long
closed     an answer is complete                  -> as new

Times are seconds by the caller's clock. `luck` is a number from 0 to 1, so that gateways do not try a worker in step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

FAILURES = 3
WINDOW_S = 30.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
JITTER = 0.2
"""Share by which a pause is longer or shorter."""
FORGOTTEN_S = 600.0
"""After so long without a failure a process has no past; those that are gone end like this as well."""


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Circuit:
    """One worker process, as one gateway has seen it."""

    failed_at: tuple[float, ...] = ()
    """Failures in a row that still count, oldest first."""
    open_until: float | None = None
    """None: it is closed."""
    pause_s: float = 0.0
    """The last one before its jitter; 0: there was none."""

    def state(self, now: float) -> State:
        if self.open_until is None:
            return State.CLOSED
        return State.OPEN if now < self.open_until else State.HALF_OPEN

    def failed(self, now: float, luck: float) -> Circuit:
        """A call has failed, and it was the worker's fault."""
        state = self.state(now)
        failed_at = (*(at for at in self.failed_at if now - at < WINDOW_S), now)[-FAILURES:]
        if state is State.OPEN or (state is State.CLOSED and len(failed_at) < FAILURES):
            return replace(self, failed_at=failed_at)
        pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s or FIRST_PAUSE_S)
        return Circuit(failed_at, now + pause_s * (1 - JITTER + 2 * JITTER * luck), pause_s)

    def begun(self, now: float) -> Circuit:
        """An answer has begun."""
        if self.state(now) is not State.HALF_OPEN:
            return self
        return Circuit((now,) * (FAILURES - 1), None, self.pause_s)

    def complete(self, now: float) -> Circuit:
        """An answer is complete. While the circuit is open, it is one that was asked for before."""
        return self if self.state(now) is State.OPEN else Circuit()


@dataclass(frozen=True, slots=True)
class View:
    """What is told of a circuit that is not as new."""

    state: State
    failures: int
    """In a row."""
    tried_in_s: float
    """Until a call may try it; 0 where calls go there, or one may."""


class Circuits:
    """Of all worker processes that one gateway knows, by their boot ids. At most one call at a time tries each."""

    def __init__(self, luck: Callable[[], float] = random.random) -> None:
        self._luck = luck
        self._circuits: dict[str, Circuit] = {}
        self._trials: dict[str, Hashable] = {}
        """Boot -> the call that may try it."""

    @property
    def all_new(self) -> bool:
        """No process has failed lately: all are admitted."""
        return not self._circuits

    def admits(self, boot: str, call: Hashable, now: float, *, going: bool = True) -> bool:
        """Whether the call may go there. Where it would be the one that tries, and is `going`, no other is admitted
        until it `leaves`, begins or fails.
        """
        circuit = self._circuits.get(boot)
        state = State.CLOSED if circuit is None else circuit.state(now)
        if state is not State.HALF_OPEN:
            return state is State.CLOSED
        return (self._trials.setdefault(boot, call) if going else self._trials.get(boot, call)) is call

    def leaves(self, call: Hashable, but: str = "") -> None:
        """The call tries nobody, or only that process."""
        for boot in [boot for boot, trying in self._trials.items() if trying is call and boot != but]:
            del self._trials[boot]

    def failed(self, boot: str, now: float) -> float:
        """For how long the process is left alone because of this failure, seconds; 0: it is not."""
        self._forget(now)
        before = self._circuits.get(boot, Circuit())
        after = self._circuits[boot] = before.failed(now, self._luck())
        self._trials.pop(boot, None)
        if after.open_until is None or after.open_until == before.open_until:
            return 0.0
        return after.open_until - now

    def begun(self, boot: str, now: float) -> None:
        circuit = self._circuits.get(boot)
        if circuit is not None:
            self._circuits[boot] = circuit.begun(now)
            self._trials.pop(boot, None)

    def complete(self, boot: str, now: float) -> None:
        circuit = self._circuits.get(boot)
        if circuit is None:
            return
        after = circuit.complete(now)
        if after == Circuit():
            del self._circuits[boot]
            self._trials.pop(boot, None)

    def states(self, now: float) -> Mapping[str, View]:
        """Boot -> what is known; a process that has not failed lately is not in it."""
        return MappingProxyType(
            {
                boot: View(
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
