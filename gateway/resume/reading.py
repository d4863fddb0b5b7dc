"""Reads a stream again from any event on: from memory if this process writes the stream, otherwise from Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from gateway.errors import PaddockError, StreamGone
from gateway.resume.recording import GONE, PIECE_BYTES, ReaderLease, Recording, split_events
from gateway.store.outage import raise_if_cancelled
from gateway.store.streams import StreamLog
from workers.protocol import keys

SIGN_EVERY_S = 0.3
"""Seconds between two signs. By a sign, a reader at another gateway shows the writing gateway that it still reads."""
LOOK_EVERY_S = 0.03
"""Seconds between two reads of Redis by a reader that has read all events so far; events reach Redis in about that
time."""
LOST_S = 2 * keys.STREAM_RENEW_S
"""Seconds that a reader waits for events which Redis lacks. If Redis has lost them, the stream's gateway notices that
within half that time, and writes them anew."""
MAX_BATCHES = 64
"""Maximum number of batches of events read from Redis in one request; a reader that is further behind asks again."""


PushEvents = Callable[[bytes], bool]
"""Takes events, each one complete, without waiting. Returns False if that is not possible; then it has taken none."""


class Reading(Protocol):
    """One reader of one stream. Close it once the client is served or gone."""

    @property
    def refusal(self) -> PaddockError | None:
        """The error that is sent in place of an answer; None: there is an answer."""
        ...

    @property
    def trace(self) -> str:
        """The `traceparent` of the span in which the stream's answer is made; empty: no trace."""
        ...

    async def take(self, push: PushEvents | None = None) -> bytes:
        """Wait for more events and return them, each one complete; empty: the stream has ended. Raises StreamGone,
        StoreUnavailable.

        While it waits, events may be handed to `push` as they are written, instead of being returned. Not all readers
        do that."""
        ...

    def close(self) -> None: ...


class LocalReading:
    """Reads a stream that this process writes, from memory."""

    def __init__(self, recording: Recording, after: int, lease: ReaderLease) -> None:
        self.recording = recording
        self._after = after
        self._lease = lease
        self._open = True
        self._push: PushEvents | None = None
        recording.num_readers += 1

    @property
    def refusal(self) -> PaddockError | None:
        return self.recording.refusal

    @property
    def trace(self) -> str:
        return self.recording.head.trace

    async def take(self, push: PushEvents | None = None) -> bytes:
        recording = self.recording
        while True:
            events, self._after = recording.after(self._after)
            if events:
                return events
            if recording.ended:
                return b""
            self._push = push
            await recording.wait(self)

    def push(self, events: bytes, last: int) -> bool:
        if self._push is None or not self._push(events):
            return False
        self._after = last
        return True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._lease.leave()
            self.recording.num_readers -= 1
            self.recording.left_at = time.monotonic()


class RemoteReading:
    """Reads a stream that another gateway writes, or that has ended, from Redis."""

    refusal: PaddockError | None = None

    def __init__(self, log: StreamLog, stream: str, after: int, trace: str, lease: ReaderLease) -> None:
        self.trace = trace
        self._lease = lease
        self._log = log
        self._stream = stream
        self._after = after
        self._num_batches = 1
        """Number of batches to read at once. The size of a batch is not known at first, so the number is doubled or
        halved until this many batches have about PIECE_BYTES together."""
        self._ended = False
        self._signed_at = float("-inf")
        self._lacks_since: float | None = None
        """time.monotonic() since when Redis has been found to lack the next events; None: it does not lack them."""

    async def take(self, push: PushEvents | None = None) -> bytes:
        while not self._ended:
            signed = await self._sign()
            page = await self._log.read(self._stream, self._after, self._num_batches)
            raise_if_cancelled()
            if page.batches and page.batches[0].first > self._after + 1:
                await self._wait_for_lost()
                continue
            events = b""
            for batch in page.batches:
                if batch.first > self._after + 1:
                    break
                self._lacks_since = None
                events += split_events(batch, self._after)
                self._after = max(self._after, batch.last)
            else:
                self._ended = page.ended
            if len(events) > PIECE_BYTES:
                self._num_batches = max(1, self._num_batches // 2)
            elif len(events) < PIECE_BYTES // 2:
                self._num_batches = min(MAX_BATCHES, self._num_batches * 2)
            if events:
                return events
            if not self._ended:
                await self._wait(may_be_over=signed)
        return b""

    def close(self) -> None:
        """Stop reading, so that another reader may be admitted. The writing gateway notices that the signs stop."""
        self._lease.leave()

    async def _sign(self) -> bool:
        """Show the writing gateway that the stream is being read, if the last sign is SIGN_EVERY_S old. Return whether
        a sign was sent."""
        now = time.monotonic()
        if now - self._signed_at < SIGN_EVERY_S:
            return False
        await self._log.sign(self._stream)
        self._signed_at = now
        return True

    async def _wait_for_lost(self) -> None:
        """Wait a moment for events that Redis lacks. Raises StreamGone if it has lacked them for LOST_S."""
        now = time.monotonic()
        if self._lacks_since is None:
            self._lacks_since = now
        elif now - self._lacks_since > LOST_S:
            raise StreamGone(GONE)
        await asyncio.sleep(LOOK_EVERY_S)

    async def _wait(self, *, may_be_over: bool) -> None:
        if may_be_over:
            if await self._log.head(self._stream) is None:
                await self._wait_for_lost()
                return
            self._lacks_since = None
            # If `_after` is beyond the stream's last event, a read finds nothing, not even the end: so ask for it.
            self._ended = await self._log.ended_by(self._stream, self._after)
        if not self._ended:
            await asyncio.sleep(LOOK_EVERY_S)
