"""Explains Redis' errors by a table of their codes, each with an operator's remedy, and limits how often clients try to
connect to a Redis that can't be reached.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from types import TracebackType
from typing import Final

from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

NOT_TRIED = "not tried again yet: "
"""Beginning of the error while a connection is not tried again; what failed last follows."""

NO_ANSWER = (RedisError, OSError)
"""Errors that a command raises, or a pipeline returns, in place of an answer. asyncio's TimeoutError is an OSError."""

REMEDIES: Final = {
    "BUSY": "a script of somebody else holds it up; SCRIPT KILL ends it",
    "LOADING": "it reads its data and will be back",
    "MISCONF": "it can't save its data and takes no writes; look at its log and its disk",
    "NOREPLICAS": "it has fewer replicas than min-replicas-to-write and takes no writes",
    "OOM": "it is full; give it more maxmemory",
    "READONLY": "it is a replica; name the master in PADDOCK_REDIS_URL",
    "MASTERDOWN": "it is a replica that has lost its master",
    "CLUSTERDOWN": "slots of the Cluster have no server",
    "TRYAGAIN": "a slot of the Cluster is on its way to another server",
    "ASK": "a slot of the Cluster is on its way to another server",
    "MOVED": "a slot of the Cluster is at another server",
    "NOAUTH": "it wants a password; put one into PADDOCK_REDIS_URL",
    "WRONGPASS": "the name or password in PADDOCK_REDIS_URL is wrong",
    "NOPERM": "its ACL refuses this user something; docs/redis.md has the rules",
    "WRONGTYPE": "a name of Paddock's holds something of another type; see what else writes to this Redis",
    "NOSCRIPT": "it forgets scripts that were just loaded; see what else uses this Redis",
}
"""Error code -> its remedy, for an operator."""

_CODE = re.compile(r"(?:^|[-\s])(" + "|".join(REMEDIES) + r")(?=\s)")
"""Finds an error's code: at its beginning, or after words that some Redis versions put before an error in a script."""


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled and still runs. Loops that use Redis call this every round.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives just as the
    command has been sent (python/cpython#86296)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def code_of(error: BaseException) -> str:
    """Return the code of an error that Redis replied, such as `BUSY`; empty for other errors and unknown codes."""
    if not isinstance(error, RedisError):
        return ""
    status = getattr(error, "status_code", None)
    if status in REMEDIES:
        return str(status)
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_of_one_name(error: BaseException) -> bool:
    """Return whether Redis works, and refused this command only because of what is stored under its key."""
    return isinstance(error, ResponseError) and code_of(error) in ("", "WRONGTYPE")


def remedy_for(error: BaseException) -> str:
    """Return what an operator can do about the error."""
    if (code := code_of(error)) in REMEDIES:
        return REMEDIES[code]
    if isinstance(error, ResponseError):
        return "this is not known; see what else uses this Redis"
    if isinstance(error, (ConnectionError, TimeoutError, OSError)):
        return "check that it runs, and PADDOCK_REDIS_URL"
    return "what stands there is not as this version of Paddock wrote it"


LATE_S = 0.05
"""Seconds for which an answer that is late is waited for in addition. If the event loop itself was held up, or the
process stood still, the answer lies in the socket, and uvloop calls timers before it reads."""


class LateTimeout:
    """Bounds the time of a block like `asyncio.timeout`, but gives it `LATE_S` once the time is over."""

    __slots__ = ("_loop", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._look_again)

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(LATE_S, self._end)

    def _end(self) -> None:
        self._timeout.reschedule(self._loop.time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)


FIRST_S = 0.02
LONGEST_S = 0.5
"""A `Gate` is closed for at least `FIRST_S` seconds after a first failure, and for at most `LONGEST_S` after any."""


class Gate:
    """Limits attempts to connect. Each failure closes the gate twice as long as the last one, less a random part."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0
        self._opens_at = 0.0
        self._why = ""

    def enter(self) -> None:
        """Raise ConnectionError while the gate is closed. When it opens after a failure, the first caller that passes
        closes it again, so that one attempt is made at a time."""
        if not self._failures:
            return
        now = time.monotonic()
        if now < self._opens_at:
            raise ConnectionError(NOT_TRIED + self._why)
        self._close(now)

    def failed(self, why: object) -> None:
        self._failures += 1
        self._why = str(why)
        self._close(time.monotonic())

    def passed(self) -> None:
        self._failures = 0

    def _close(self, now: float) -> None:
        # More doublings than this make no difference, and large powers are slow.
        longest_s = min(self._longest_s, self._first_s * 2 ** min(self._failures, 16))
        self._opens_at = now + longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
