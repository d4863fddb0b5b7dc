"""Bounds how many requests begin in one iteration of the event loop (here: a turn), and how long received bytes are
parsed in it, so that running requests go on in between. The others wait, in one queue per caller, served in rotation.

Callers are recognised by a key that was valid lately, which is looked for in a request's bytes before they are parsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from time import monotonic, thread_time
from typing import Generic, Protocol, TypeVar

TURN_S = 0.001
"""Seconds of processor time that the requests of one turn should take together; if they took more, fewer may begin."""
FIRST_MOST = 8
"""Maximum number of requests that begin in a turn, before it is known how long they take."""
MOST = 128
REST_FACTOR = 2.0
"""Length of the pause that unknown callers make after a turn in which some of their waiting requests began. It is a
multiple of that turn's processor time: reading requests and writing answers takes about as long again."""
CROWD = 16
"""A known caller with at least this many waiting requests pauses between turns, while several known callers compete."""
CROWD_REST_FACTOR = 3.0
"""Length of a known caller's pause (`CROWD`), as a multiple of how long its requests took in the last turn. What counts
is the time that passed, not the processor's: where others need the processor too, the pause is longer.

Measured with 300 streams that are all given up after 0.3 s, again and again, on one core with Redis and a worker: the
TTFT p95 of another caller is 92 ms with pauses by processor time, 54 by the time that passed."""
CONTESTED_S = 1.0
"""Seconds for which known callers count as competing after requests of two of them were queued one after the other."""


class Waiting(Protocol):
    """A connection that has received a request, or further bytes of a request's head."""

    def begin(self) -> None:
        """Begin the request, since its turn has come."""


class Departure:
    """A request or WebSocket whose peer has left, and whose task does not know it yet."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """`tell` wakes the task."""
        self._tell = tell

    def begin(self) -> None:
        """Tell the task, since its turn has come."""
        self._tell()


WaitingT = TypeVar("WaitingT")


class Lines(Generic[WaitingT]):
    """Named queues that are served in rotation."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[WaitingT, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, name: str, waiting: WaitingT) -> None:
        self._lines.setdefault(name, OrderedDict())[waiting] = None

    def remove(self, name: str, waiting: WaitingT) -> None:
        line = self._lines[name]
        del line[waiting]
        if not line:
            del self._lines[name]

    def num_waiting(self, name: str) -> int:
        return len(self._lines.get(name, ()))

    def next(self, paused: Container[str] = ()) -> tuple[str, WaitingT] | None:
        """Return the name of the next queue that is not `paused`, and its first connection, which stays there; None if
        all queues are paused."""
        name = next((name for name in self._lines if name not in paused), None)
        if name is None:
            return None
        self._lines.move_to_end(name)
        return name, next(iter(self._lines[name]))


class Pacer:
    """Holds the requests of one server that have not begun.

    Each known caller has a queue; unknown callers have one per address. In each round, every known caller begins one
    request, and all unknown callers together begin one: so callers without a key, however many, hold up nobody who has
    one. A known caller with a `CROWD` of requests pauses while others compete, as begun requests take time from all."""

    def __init__(self, *, rests: bool = False, contested: bool = False) -> None:
        """`rests`: whether unknown callers (`REST_FACTOR`) and callers with many requests (`CROWD`) make pauses.
        `contested`: whether such callers pause even if no other caller's requests wait."""
        self._rests = rests
        self._rest_until = 0.0
        """time.monotonic() until which unknown callers' requests pause."""
        self._paused: dict[str, float] = {}
        """Known caller whose requests pause -> time.monotonic() at which the pause ends."""
        self._last_caller = ""
        self._contested_until = math.inf if contested else 0.0
        """time.monotonic() until which known callers count as competing (`CONTESTED_S`)."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires when requests that pause may begin again."""
        self._known, self._unknown = Lines[Waiting](), Lines[Waiting]()
        self._line_of: dict[Waiting, tuple[Lines[Waiting], str]] = {}
        self._most = FIRST_MOST
        self._num_begun = 0
        """Requests that began in this turn of the loop."""
        self._num_known = 0
        """Waiting requests of known callers that have begun since the last one of an unknown caller began."""
        self._num_unknown = 0
        """Waiting requests of unknown callers that began in this turn."""
        self._begun_by = Counter[str]()
        """Known caller -> number of the caller's waiting requests that began in this turn."""
        self._turning = False
        self._spent_s = 0.0
        """Processor seconds that calls of `begin` took in this turn, without the requests' tasks, which run later."""
        self._tasks_at: float | None = None
        self._turn_at = 0.0
        """time.monotonic() when the last turn began."""

    @property
    def num_waiting(self) -> int:
        return len(self._line_of)

    def may_begin(self) -> bool:
        """Return whether a request may begin at once: no other waits, and this turn of the event loop has room. If so,
        count it as begun."""
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
            if caller and caller != self._last_caller:
                if self._last_caller and self._contested_until < math.inf:
                    self._contested_until = monotonic() + CONTESTED_S
                self._last_caller = caller
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
        loop, now = asyncio.get_running_loop(), monotonic()
        self._paused = {caller: until for caller, until in self._paused.items() if until > now}
        unknown_pause = self._rests and self._rest_until > now
        waiting = self._next(unknown_pause)
        if waiting is None:
            self._turning = False
            self._wake_later(now)
            return
        # The tasks that `begin` makes run between `_mark` and the next `_turn`, so their time is known.
        loop.call_soon(self._mark)
        began_at = thread_time()
        self._turn_at = now
        try:
            while waiting is not None:
                self._num_begun += 1
                self.leave(waiting)
                waiting.begin()
                waiting = self._next(unknown_pause) if self._num_begun < self._most else None
        finally:
            self._spent_s = thread_time() - began_at
            loop.call_soon(self._turn)

    def _wake_later(self, now: float) -> None:
        """Have the next turn begin when the first pause ends, if any request waits for the end of a pause."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = list(self._paused.values()) if self._known else []
        if self._unknown:
            ends.append(self._rest_until)
        if ends:
            self._timer = asyncio.get_running_loop().call_later(min(ends) - now, self._turn_soon)

    def _next(self, unknown_pause: bool) -> Waiting | None:
        """Return the request that is next; None: there is none. `unknown_pause`: whether unknown callers pause."""
        is_known = not self._unknown or unknown_pause or self._num_known < len(self._known)
        found = self._known.next(self._paused) if is_known else None
        if found is not None:
            self._num_known += 1
            self._begun_by[found[0]] += 1
            return found[1]
        found = None if unknown_pause else self._unknown.next()
        if found is None:
            return None
        self._num_known = 0
        self._num_unknown += 1
        return found[1]

    def _mark(self) -> None:
        self._tasks_at = thread_time()

    def _learn(self) -> None:
        """Halve the maximum of requests per turn if the last turn took too long; else add one if it was reached."""
        if self._tasks_at is None:
            return
        took_s = self._spent_s + thread_time() - self._tasks_at
        self._tasks_at = None
        if self._num_unknown:
            self._num_unknown, self._rest_until = 0, monotonic() + REST_FACTOR * took_s
        self._pause_crowds()
        if took_s > TURN_S:
            self._most = max(1, self._most // 2)
        elif self._num_begun == self._most < MOST:
            self._most += 1

    def _pause_crowds(self) -> None:
        """Pause callers with a `CROWD` waiting after a turn, if callers compete."""
        now = monotonic()
        took_s = now - self._turn_at
        if self._rests and now < self._contested_until:
            for caller, num_begun in self._begun_by.items():
                if self._known.num_waiting(caller) >= CROWD:
                    share = num_begun / self._num_begun
                    self._paused[caller] = now + CROWD_REST_FACTOR * share * took_s
        self._begun_by.clear()


PARSE_S = 0.001
"""Processor seconds per turn after which connections with more bytes to parse wait for a later turn."""
PARSE_REST_FACTOR, MAX_PARSE_REST_S = 2.0, 0.05
"""Pause after a turn that used up `PARSE_S`: the turn's seconds times the first number, but at most the second."""


class Parsing(Protocol):
    """A connection with bytes of a body or of WebSocket frames that are not parsed yet."""

    def parse_on(self) -> None:
        """Parse one more piece, since its turn has come. Call `ParseTurns.wait` if bytes are left."""


class ParseTurns:
    """Shares the time for parsing bodies and WebSocket frames among all connections of one server, caller by caller.

    Without turns, one piece for each of hundreds of connections, with the shortest frames, took seconds every time."""

    def __init__(self) -> None:
        self._lines: Lines[Parsing] = Lines()
        self._line_of: dict[Parsing, str] = {}
        self._spent_s = 0.0
        """Processor seconds spent on parsing in this turn."""
        self._is_scheduled = False

    def may_parse(self) -> bool:
        """Return whether a piece may be parsed at once: no connection waits, and this turn has time left."""
        return not self._line_of and self._spent_s < PARSE_S

    def waits(self, connection: Parsing) -> bool:
        return connection in self._line_of

    def wait(self, connection: Parsing, caller: str) -> None:
        """Have `parse_on` called in the connection's turn. `caller`: the name of its queue."""
        if connection not in self._line_of:
            self._line_of[connection] = caller
            self._lines.add(caller, connection)
            self._turn_soon()

    def leave(self, connection: Parsing) -> None:
        """Take a connection out of its queue: it is gone, or parses on."""
        caller = self._line_of.pop(connection, None)
        if caller is not None:
            self._lines.remove(caller, connection)

    def spent(self, seconds: float) -> None:
        """Count processor seconds that a piece took."""
        self._spent_s += seconds
        self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        spent_s, self._spent_s = self._spent_s, 0.0
        if self._line_of and spent_s >= PARSE_S:
            rest_s = min(PARSE_REST_FACTOR * spent_s, MAX_PARSE_REST_S)
            asyncio.get_running_loop().call_later(rest_s, self._turn)
            return
        self._is_scheduled = False
        try:
            while self._spent_s < PARSE_S and (found := self._lines.next()) is not None:
                self.leave(found[1])
                found[1].parse_on()
        finally:
            if self._line_of:
                self._turn_soon()


MAX_CALLERS = 1024
LATELY_S = 600.0
"""Seconds after which a key counts as unknown if it has not been verified again."""
LOOKED_AT_BYTES = 4 << 10
"""Bytes at a request's beginning that are searched for a key; a caller whose key comes later counts as unknown."""

KEY = re.compile(rb"\r\n(?:authorization:[ \t]*bearer[ \t]|(?:x-|x-goog-)?api-key:)[ \t]*([^\r\n]+)", re.IGNORECASE)


class KnownCallers:
    """Keeps digests of the API keys that this process verified lately, to recognise their callers. The digests are made
    with a random secret of the process: whoever sees them without it can neither read nor test a key."""

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
        return self.known(self.digest_of(request))

    def digest_of(self, request: bytes) -> bytes:
        """Return the digest of the key in a request that begins with these bytes, valid or not; empty without a key."""
        found = KEY.search(request, 0, LOOKED_AT_BYTES)
        return b"" if found is None else self._digest(found[1].rstrip())

    def known(self, digest: bytes) -> str:
        """Return a name for the caller whose key has this digest; empty if the key was not verified lately."""
        verified_at = self._verified_at.get(digest)
        return "" if verified_at is None or monotonic() - verified_at > LATELY_S else digest.hex()

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._secret).digest()
