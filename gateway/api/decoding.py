"""Work on large bodies, away from the event loop: one at a time, the teams that wait taking turns.

A thread shares the interpreter with the loop, so what bounds the loop's waits is that no single call in here is long
(`gateway.api.body_bounds`), and that the thread rests as long as it worked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

from workers.heap import give_back_free

INLINE_BYTES = 256 << 10
INLINE_STRINGS = 2_000
"""Up to this a body takes a millisecond or two."""
LONGEST_REST_S = 0.25
TIDY_AFTER_S = 1.0

ResultT = TypeVar("ResultT")


class DecodingLane:
    """One thread, and who waits for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By team; the team whose turn it is comes first."""
        self._busy = False
        self._tidying: asyncio.TimerHandle | None = None

    async def run(self, team: str, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; raises what it raises. It must not touch what the loop may change."""
        await self._turn(team)
        loop, began = asyncio.get_running_loop(), monotonic()
        job = loop.run_in_executor(self._thread, work)
        try:
            # One that is begun goes on when its caller leaves: the next one waits for it.
            return await asyncio.shield(job)
        finally:
            job.add_done_callback(lambda _: self._rest(monotonic() - began))
            # An error knows this frame, and the job the error: with the job here, a body would wait for the collector.
            del job, work

    def tidy(self) -> None:
        """Give free memory back to the system, soon and not often."""
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_AFTER_S, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        self._thread.submit(give_back_free)

    def _rest(self, took_s: float) -> None:
        asyncio.get_running_loop().call_later(min(took_s, LONGEST_REST_S), self._next)

    async def _turn(self, team: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(team, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        """Let the next team's first one in; teams come round."""
        while self._waiting:
            team, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            del self._waiting[team]
            if turns:
                self._waiting[team] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
