"""Bytes that requests hold in this process, from the first byte of a body until the call is over.

A team may hold as much as is free beside it: alone half of all, two at once a third each, so there is room for whoever
comes next (the dynamic thresholds of shared-memory switches; Choudhury and Hahne, 1998). A key has three quarters of
what its team may hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.call import Principal
from gateway.errors import HeldTooMuch, MemoryFull, TakesTooMuch

KEY_SHARE = 0.75
RETRY_AFTER_S = 1.0


class MemoryBudget:
    """The bytes that are held, by team and by key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._of_team: dict[str, int] = {}
        self._of_key: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return self._held

    @property
    def largest(self) -> int:
        """Return the bytes that a single key may hold when nobody else holds any."""
        return int(self._max_bytes // 2 * KEY_SHARE)

    def reserve(self, principal: Principal) -> Reservation:
        """Return a reservation of no bytes, to be grown; close it in any case."""
        return Reservation(self, principal)

    def take(self, principal: Principal, num_bytes: int, num_before: int = 0) -> None:
        """Take so many bytes for a request. `num_before`: bytes that it holds already.

        Raises TakesTooMuch for what never fits, HeldTooMuch, MemoryFull.
        """
        if num_before + num_bytes > self.largest:
            raise TakesTooMuch(
                f"The request and its answer take {num_before + num_bytes} bytes of memory; one key may hold "
                f"{self.largest}. Send less or ask for less, or have the operator raise PADDOCK_CALL_MEMORY_BYTES."
            )
        free = self._max_bytes - self._held
        of_team = self._of_team.get(principal.team, 0) + num_bytes
        of_key = self._of_key.get(principal.key_id, 0) + num_bytes
        may = (free + of_team - num_bytes) // 2
        if num_bytes > free:
            message = f"Requests hold {self._held} bytes of this gateway's memory; {self._max_bytes} may. Try again."
            raise MemoryFull(message, retry_after_s=RETRY_AFTER_S)
        if of_team > may or of_key > may * KEY_SHARE:
            what, held, most = ("team", of_team, may) if of_team > may else ("key", of_key, int(may * KEY_SHARE))
            message = (
                f"With this one, the requests of this {what} that are under way would hold {held} bytes of the "
                f"gateway's memory; {most} are its share now. Wait for some to end."
            )
            raise HeldTooMuch(message, retry_after_s=RETRY_AFTER_S)
        self.add(principal, num_bytes)

    def add(self, principal: Principal, num_bytes: int) -> None:
        """Count bytes that are held anyway, or, where the number is negative, given back."""
        self._held += num_bytes
        for held, name in ((self._of_team, principal.team), (self._of_key, principal.key_id)):
            now = held.get(name, 0) + num_bytes
            if now:
                held[name] = now
            else:
                held.pop(name, None)


class Reservation:
    """The bytes that one request holds."""

    __slots__ = ("_budget", "_num_holders", "_principal", "num_bytes")

    def __init__(self, budget: MemoryBudget, principal: Principal) -> None:
        self._budget = budget
        self._principal = principal
        self._num_holders = 1
        self.num_bytes = 0

    @property
    def team(self) -> str:
        return self._principal.team

    def grow(self, num_bytes: int) -> None:
        """Hold at least so many bytes. Raises as `resize`."""
        if num_bytes > self.num_bytes:
            self.resize(num_bytes)

    def add(self, num_bytes: int) -> None:
        """Hold so many bytes more, or fewer where it is negative. Raises as `resize`."""
        self.resize(self.num_bytes + num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Hold so many bytes from now on. Raises as `MemoryBudget.take`, and holds as many as before then."""
        more = num_bytes - self.num_bytes
        if more > 0:
            self._budget.take(self._principal, more, self.num_bytes)
        elif more:
            self._budget.add(self._principal, more)
        self.num_bytes = num_bytes

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it at least until the block ends, for whoever goes on with the request without its connection."""
        if not self._num_holders:
            self._budget.add(self._principal, self.num_bytes)
        self._num_holders += 1
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Count one holder less; the last one gives everything back."""
        self._num_holders -= 1
        if not self._num_holders:
            self._budget.add(self._principal, -self.num_bytes)
