"""Lets some requests begin in each turn of the event loop. The others wait, one queue per caller, and the callers take
turns; requests that run already go on in between.

Callers are recognised by a key that was valid lately, in a request's bytes before they are parsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import OrderedDict
from time import monotonic, thread_time
from typing import Protocol

TURN_S = 0.001
"""Seconds of processor time that the requests which begin in one turn may take together."""
FIRST_MOST = 8
"""Most requests that begin in a turn, until it is known how long they take."""
MOST = 128
REST_FACTOR = 2.0
"""The pause after requests of unknown callers began, as a multiple of the time that took: reading them and writing the
answers take about as long again. Meanwhile others have the loop, and its core, to themselves.
"""


class Waiting(Protocol):
    """A connection on which a request, or more of its head, has come."""

    def begin(self) -> None:
        """Begin the request, since its turn has come."""


class _Lines:
    """Queues that take turns, each with its name."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[Waiting, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, name: str, waiting: Waiting) -> None:
        self._lines.setdefault(name, OrderedDict())[waiting] = None

    def remove(self, name: str, waiting: Waiting) -> None:
        line = self._lines[name]
        del line[waiting]
        if not line:
            del self._lines[name]

    def next(self) -> Waiting:
        """Return the first of the queue whose turn it is. It stays there until it is removed."""
        name, line = next(iter(self._lines.items()))
        self._lines.move_to_end(name)
        return next(iter(line))


class Pacer:
    """The requests of one server that have not begun.

    Each known caller has a queue; unknown callers have one per address. The queues of known callers take turns with
    each other and with all others together, so that no crowd without a key stands before a caller who has one.
    """

    def __init__(self, *, rests: bool = False) -> None:
        """`rests`: after requests of unknown callers began, the next of them wait, to leave time to everybody else."""
        self._rests = rests
        self._rest_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Fires when unknown callers' requests may begin again."""
        self._known, self._unknown = _Lines(), _Lines()
        self._line_of: dict[Waiting, tuple[_Lines, str]] = {}
        self._most = FIRST_MOST
        self._num_begun = 0
        """Requests that began in this turn of the loop."""
        self._num_known = 0
        """Requests of known callers that began since one of an unknown caller did."""
        self._num_unknown = 0
        """Requests of unknown callers that began in this turn."""
        self._turning = False
        self._spent_s = 0.0
        """Processor seconds that `begin` took in this turn; the requests' tasks run in the next one."""
        self._tasks_at: float | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._line_of)

    def may_begin(self) -> bool:
        """Return whether a request may begin at once: none waits, and this turn of the event loop has room. If so, it
        counts as begun.
        """
        if self._line_of or self._num_begun >= self._most:
            return False
        self._num_begun += 1
        self._turn_soon()
        return True

    def wait(self, waiting: Waiting, caller: str, address: str) -> None:
        """Queue a request that may not begin at once; its `begin` is called in its turn. `caller`: empty if unknown."""
        if waiting not in self._line_of:
            line = self._line_of[waiting] = (self._known, caller) if caller else (self._unknown, address)
            line[0].add(line[1], waiting)
            self._turn_soon()

    def waits(self, waiting: Waiting) -> bool:
        return waiting in self._line_of

    def leave(self, waiting: Waiting) -> None:
        """Take a request out of its queue: it is gone, or begins."""
        line = self._line_of.pop(waiting, None)
        if line is not None:
            line[0].remove(line[1], waiting)

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._learn()
        self._num_begun = 0
        loop = asyncio.get_running_loop()
        rest_s = self._rest_until - monotonic() if self._rests else 0.0
        if not self._known and (not self._unknown or rest_s > 0):
            self._turning = False
            if self._unknown and self._timer is None:
                self._timer = loop.call_later(rest_s, self._rested)
            return
        # The tasks that `begin` makes run between these two callbacks, so their time is known.
        loop.call_soon(self._mark)
        began_at = thread_time()
        try:
            while self._num_begun < self._most and (waiting := self._next(rest_s > 0)) is not None:
                self._num_begun += 1
                self.leave(waiting)
                waiting.begin()
        finally:
            self._spent_s = thread_time() - began_at
            loop.call_soon(self._turn)

    def _rested(self) -> None:
        self._timer = None
        self._turn_soon()

    def _next(self, resting: bool) -> Waiting | None:
        """Return the request whose turn it is; None: nobody's. `resting`: unknown callers have no turn now."""
        if self._unknown and not resting and (self._num_known >= len(self._known)):
            self._num_known = 0
            self._num_unknown += 1
            return self._unknown.next()
        if self._known:
            self._num_known += 1
            return self._known.next()
        return None

    def _mark(self) -> None:
        self._tasks_at = thread_time()

    def _learn(self) -> None:
        """Halve the number that may begin in a turn where the last ones took too long; else raise it by one."""
        if self._tasks_at is None:
            return
        took_s = self._spent_s + thread_time() - self._tasks_at
        self._tasks_at = None
        if self._num_unknown:
            self._num_unknown, self._rest_until = 0, monotonic() + REST_FACTOR * took_s
        if took_s > TURN_S:
            self._most = max(1, self._most // 2)
        elif self._num_begun == self._most < MOST:
            self._most += 1


MAX_CALLERS = 1024
LATELY_S = 600.0
"""Seconds after which a key that has not been verified again is unknown."""
LOOKED_AT_BYTES = 4 << 10
"""Bytes of a request that are searched for a key; a caller whose key stands behind them counts as unknown."""

KEY = re.compile(rb"\r\n(?:authorization:[ \t]*bearer[ \t]|x-api-key:)[ \t]*([^\r\n]+)", re.IGNORECASE)


class KnownCallers:
    """Digests of keys that this process has verified lately. They are made with a secret of the process and looked up
    in a dict, so no keys are kept, nor anything that could be compared with them.
    """

    def __init__(self, most: int = MAX_CALLERS) -> None:
        self._most = most
        self._secret = os.urandom(32)
        self._verified_at: OrderedDict[bytes, float] = OrderedDict()

    def verified(self, key: bytes) -> None:
        """Note that the key is valid now."""
        digest = self._digest(key)
        self._verified_at[digest] = monotonic()
        self._verified_at.move_to_end(digest)
        if len(self._verified_at) > self._most:
            self._verified_at.popitem(last=False)

    def caller_of(self, request: bytes) -> str:
        """Return a name for the caller of a request that begins with these bytes; empty for an unknown one."""
        found = KEY.search(request, 0, LOOKED_AT_BYTES)
        if found is None:
            return ""
        digest = self._digest(found[1].rstrip())
        verified_at = self._verified_at.get(digest)
        return "" if verified_at is None or monotonic() - verified_at > LATELY_S else digest.hex()

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._secret).digest()
