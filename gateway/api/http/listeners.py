"""Sends server-sent events to those who listen for what changes, for as long as they do: within bounds, and for at most
an hour, so that their keys are asked for again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope, Send

from gateway.api.http.diagnostics import answer_headers, request_log_of
from gateway.api.http.streaming import EventStream, chunk_writer_of, written
from gateway.api.intake.disconnect import ClientGone, until_disconnect
from gateway.back_pressure import too_many_listeners, too_many_listeners_of_key
from gateway.call import Principal
from workers.process.ticks import wait_tick

MOST_LISTENERS, MOST_PER_KEY = 64, 8
LIFE_S = 3600.0
WRITE_S = 10.0
"""Seconds that a client has to read what was sent, while its buffers are full."""

NextEvents = Callable[[], Awaitable[bytes]]
"""Returns the events that are due, whole; empty: there are none."""


class Listeners:
    """The streams of one route. Each ends with its gateway, at the latest after LIFE_S."""

    def __init__(self, is_leaving: Callable[[], bool], ping_interval_s: float, every_s: float) -> None:
        """`is_leaving` returns whether this gateway drains or stops, which ends all streams. `every_s`: seconds between
        two looks for events."""
        self._is_leaving = is_leaving
        self._ping_interval_s = ping_interval_s
        self._every_s = every_s
        self._per_key: Counter[str] = Counter()

    async def serve(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send, next_events: NextEvents
    ) -> None:
        """Send events until the client leaves. Raises TooManyRequests, TooManyConnections."""
        request_log = request_log_of(scope)
        with self._counted(principal.key_id):
            stream = EventStream(send, lambda: answer_headers(request_log), chunk=chunk_writer_of(scope))
            async with until_disconnect(receive):
                request_log.status, request_log.outcome = 200, "ok"
                await stream.start()
                await stream.pinged(self._write(stream, next_events), self._ping_interval_s)
                await stream.end(b"")

    async def _write(self, stream: EventStream, next_events: NextEvents) -> None:
        until = time.monotonic() + LIFE_S
        while time.monotonic() < until and not self._is_leaving():
            if events := await next_events():
                try:
                    async with asyncio.timeout(WRITE_S):
                        await written(stream.write(events))
                except TimeoutError:
                    raise ClientGone from None
            await wait_tick(self._every_s)

    @contextmanager
    def _counted(self, key: str) -> Iterator[None]:
        """Count a listener while the block lasts."""
        if self._per_key[key] >= MOST_PER_KEY:
            raise too_many_listeners_of_key(MOST_PER_KEY)
        if self._per_key.total() >= MOST_LISTENERS:
            raise too_many_listeners(MOST_LISTENERS)
        self._per_key[key] += 1
        try:
            yield
        finally:
            self._per_key[key] -= 1
            if not self._per_key[key]:
                del self._per_key[key]
