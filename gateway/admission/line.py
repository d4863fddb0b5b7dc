"""What this gateway process has in the line and in hand: its waiting calls and its leases. Memory only, no Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from gateway.store.client import Lease


@dataclass(slots=True, eq=False)
class Waiter:
    """One call between the door and its slot."""

    id: str
    model: str
    avoid: frozenset[str]
    deadline: float
    """time.monotonic() after which it stops waiting."""
    arrival: int | None = None
    """Its number in the line; None until Redis has said so."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a grant may be there to claim, and when this gateway stops."""


class HoldTime:
    """How long calls of one model hold a slot, in seconds: a moving average, for predicting waits."""

    WEIGHT = 0.1
    FIRST_GUESS_S = 2.0

    def __init__(self) -> None:
        self.mean_s = self.FIRST_GUESS_S

    def add(self, held_s: float) -> None:
        self.mean_s += self.WEIGHT * (held_s - self.mean_s)


class Line:
    """Waiters and leases of this process, by model, and how many leases each worker was last known to have."""

    def __init__(self) -> None:
        self.waiters: dict[str, Waiter] = {}
        self.held: dict[str, Lease] = {}
        self._held_since: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._in_use: dict[str, dict[str, int]] = {}
        self._hold_times: dict[str, HoldTime] = {}

    def enter(self, waiter: Waiter) -> None:
        self.waiters[waiter.id] = waiter
        self._waiting[waiter.model] += 1

    def leave(self, waiter: Waiter) -> None:
        if self.waiters.pop(waiter.id, None) is not None:
            self._waiting[waiter.model] -= 1

    def hold(self, lease: Lease, now: float) -> None:
        self.held[lease.id] = lease
        self._held_since[lease.id] = now
        self._in_flight[lease.model] += 1

    def let_go(self, lease: Lease, now: float) -> bool:
        """False when the lease was not held any more."""
        if self.held.pop(lease.id, None) is None:
            return False
        self._in_flight[lease.model] -= 1
        self._hold_times.setdefault(lease.model, HoldTime()).add(now - self._held_since.pop(lease.id))
        return True

    def waiting(self, model: str) -> int:
        return self._waiting[model]

    def in_flight(self, model: str) -> int:
        return self._in_flight[model]

    def in_use(self, model: str) -> dict[str, int]:
        """Worker id -> leases of all gateways, as last heard, with what this process is asking for added."""
        return self._in_use.setdefault(model, {})

    def expect(self, model: str, worker: str, change: int) -> None:
        """A lease on this worker is being taken (+1) or was given back (-1); Redis's next answer puts it right."""
        counts = self.in_use(model)
        if worker in counts:
            counts[worker] = max(0, counts[worker] + change)

    def heard(self, model: str, worker: str, leases: int) -> None:
        self.in_use(model)[worker] = leases

    def heard_all(self, model: str, leases: dict[str, int]) -> None:
        self._in_use[model] = leases

    def predicted_wait_s(self, model: str, waiting: int, slots: int) -> float:
        """How long a call that came now, behind `waiting` others, would wait for one of `slots`."""
        mean_s = self._hold_times.get(model, HoldTime()).mean_s
        return (waiting + 1) * mean_s / max(1, slots)

    def models(self) -> set[str]:
        """Models with anything waiting or held here."""
        return {waiter.model for waiter in self.waiters.values()} | {lease.model for lease in self.held.values()}
