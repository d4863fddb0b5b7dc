"""Admission to an engine: which calls are in it, and whether more are taken. For any thread; nothing here blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from workers.protocol.events import CallFailed, Failure, FailureCode

MIN_WAITING_ROOM = 4

DRAINING = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
CRASHED = Failure(FailureCode.INTERNAL, "this worker's engine has crashed; ask again")
NO_MEMORY = Failure(FailureCode.OUT_OF_MEMORY, "this worker has run out of memory and starts anew; send it again")


class Intake:
    """Admits calls to an engine: `slots` calls, and as many more (at least `MIN_WAITING_ROOM`) that wait."""

    def __init__(self, slots: int, beyond: int = 0) -> None:
        """`beyond`: calls that gateways may place although all slots are taken; they always have room to wait."""
        self._slots = slots
        self._room = max(slots, MIN_WAITING_ROOM + beyond)
        # Guards what follows, which must agree: the calls that are alive, and whether more are taken.
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._refusal: Failure | None = None
        self._over = False

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    @property
    def refusal(self) -> Failure:
        """Return why no more calls are taken; calls that are still in when the engine ends get this failure."""
        return self._refusal or CRASHED

    def enter(self, key: int) -> None:
        """Admit a call. Raises CallFailed: BUSY, or why no more calls are taken."""
        with self._lock:
            if self._refusal is not None:
                raise CallFailed(self._refusal)
            if key in self._open:
                raise ValueError(f"call {key} is already in the engine")
            if len(self._open) >= self._slots + self._room:
                raise CallFailed(self._busy())
            self._open.add(key)

    def hand_over(self, key: int, post: Callable[[], None]) -> bool:
        """Post a call that has entered; return False if it was cancelled since or the engine has ended."""
        with self._lock:
            if self._over or key in self._cancelled:
                return False
            post()
            return True

    def leave(self, key: int) -> None:
        with self._lock:
            self._open.discard(key)

    def cancel(self, key: int, post: Callable[[], None]) -> bool:
        """Post the end of a call that is in the engine; return whether it is in."""
        with self._lock:
            if key not in self._open:
                return False
            self._cancelled.add(key)
            post()
            return True

    def take_cancelled(self) -> frozenset[int]:
        """Return the cancelled calls, which emit nothing more; those that have left since are forgotten."""
        if not self._cancelled:
            return frozenset()
        with self._lock:
            cancelled = frozenset(self._cancelled)
            self._cancelled &= self._open
        return cancelled

    def drain(self) -> None:
        with self._lock:
            self._refusal = self._refusal or DRAINING

    def crash(self, error: BaseException) -> None:
        """Refuse calls from now on, since the engine has ended with this error."""
        with self._lock:
            self._refusal = NO_MEMORY if isinstance(error, MemoryError) else CRASHED

    def end(self) -> bool:
        """Hand over nothing from now on; return whether this is the first call."""
        with self._lock:
            first, self._over = not self._over, True
            return first

    @property
    def is_over(self) -> bool:
        return self._over

    def _busy(self) -> Failure:
        message = (
            f"all {self._slots} slots and the waiting room for {self._room} are taken; ask again, or serve with more "
            "--slots"
        )
        return Failure(FailureCode.BUSY, message)
