"""One resumable stream: its numbered events, of which the newest are kept up to a limit of bytes, and its readers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from gateway.back_pressure import too_many_readers, too_many_readers_of_team
from gateway.errors import PaddockError, StoreUnavailable, StreamGone
from gateway.store.streams import Batch, StreamInfo, StreamLog, Write

GONE = (
    "This stream is not here any more: it ended too long ago, was given up, or its gateway is gone. Send the request "
    "without `Last-Event-ID`."
)

PIECE_BYTES = 128 << 10
"""Approximate bytes that a reader gets at once. Until they are sent to a slow reader, they take memory in addition to
the stream."""


class WaitingReader(Protocol):
    """A reader that has read all events of a stream so far."""

    def push(self, events: bytes, last: int) -> bool:
        """Take new events, the last of which has the number `last`, within the turn that wrote them. Return False if
        they are not taken; the reader then asks for them itself."""
        ...


class Recording:
    """The events of one stream. One task writes them, any number of tasks on this event loop read them; each write is
    copied to Redis.

    It is the sink of a streamed answer (`gateway.api.responder.Sink`), and never makes its writer wait."""

    def __init__(self, stream: str, head: StreamInfo, max_bytes: int) -> None:
        self.stream = stream
        self.head = head
        self.started = False
        """Whether the answer has begun."""
        self.ended = False
        """Whether the last event has been written."""
        self.refusal: PaddockError | None = None
        """The error sent in place of an answer; None: there is none."""
        self.dropped = False
        """Whether the stream was given up, so that it can't be read any more."""
        self.on_start: Callable[[], Awaitable[None]] | None = None
        self.num_readers = 0
        self.left_at = time.monotonic()
        """time.monotonic() when the last reader left."""
        self.ended_at = 0.0
        self.settled = False
        """Whether Redis has all events, the last one included."""
        self._waiting: dict[WaitingReader, asyncio.Future[None]] = {}
        """Readers that have read everything -> what wakes them."""
        self._id = b"id: %b:" % stream.encode()
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._num_bytes = 0
        self._first = 1
        self._flushed = 0

    @property
    def last(self) -> int:
        """The number of the newest event; 0: there are no events yet."""
        return self._first + len(self._events) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the events that are kept for reading again."""
        return self._num_bytes

    def keep_at_most(self, num_bytes: int) -> None:
        """Set how many bytes of events are kept for reading again; older events beyond that are dropped at the next
        write."""
        self._max_bytes = num_bytes

    async def start(self) -> None:
        self.started = True
        if self.on_start is not None:
            await self.on_start()

    def write(self, body: bytes) -> None:
        """Append events, which must be whole; each gets its number. Readers that wait are told. Runs once per token."""
        number, added = self.last, []
        for event in body.split(b"\n\n")[:-1]:
            number += 1
            added.append(b"%b%d\n%b\n\n" % (self._id, number, event))
        self._events += added
        events = b"".join(added)
        self._num_bytes += len(events)
        if self._num_bytes > self._max_bytes:
            self._trim()
        self._tell(events, number)

    def refuse(self, error: PaddockError, body: bytes) -> None:
        """Record the error to send in place of an answer; `body`: the error as an event, for clients whose stream has
        begun."""
        # The error lives as long as the stream; a traceback would hold the frames of the call, and so the request.
        self.refusal = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        self.write(body)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.ended_at = time.monotonic()
            self.on_start = None  # the callback refers to the request
            self._tell(b"", self.last)

    async def wait(self, reader: WaitingReader) -> None:
        """Wait until there are events that the reader, which has all so far, did not take, or the stream ends."""
        woken = self._waiting[reader] = asyncio.get_running_loop().create_future()
        try:
            await woken
        finally:
            self._waiting.pop(reader, None)

    def check_kept(self, number: int) -> None:
        """Raise StreamGone if an event after number `number` is no longer kept."""
        if self.dropped or number + 1 < self._first:
            raise StreamGone(GONE)

    def after(self, number: int) -> tuple[bytes, int]:
        """Return about `PIECE_BYTES` of the events after number `number`, and the number of the last one returned. No
        bytes: there are no newer events yet. Raises StreamGone as `check_kept` does."""
        self.check_kept(number)
        first = end = max(0, number + 1 - self._first)
        num_bytes = 0
        while end < len(self._events) and num_bytes < PIECE_BYTES:
            num_bytes += len(self._events[end])
            end += 1
        return b"".join(self._events[first:end]), number + end - first

    def pending_write(self, *, renew: bool) -> Write | None:
        """Return the write that brings Redis up to date; None: nothing is new, and nothing has to be renewed. Call
        `mark_written` once the write is done."""
        last, flushed = self.last, self._flushed
        if self.dropped or self.settled or (flushed >= last and not renew and not self.ended):
            return None
        batch: Batch | None = None
        if flushed < last:
            first = max(flushed + 1, self._first)
            body, last = self.after(first - 1)
            batch = Batch(first, last, body)
        ended, is_first = self.ended and last == self.last, not flushed
        # Without renewal a write only adds to an existing key; the first write has to make it.
        renew = renew or ended or is_first
        return Write(self.stream, self.head, batch, self._first, ended, last, renew, is_first)

    def mark_written(self, write: Write) -> None:
        self._flushed = max(self._flushed, write.last)
        self.settled = self.settled or write.ended

    def mark_lost(self) -> None:
        """Have everything written to Redis anew, which has lost it."""
        self._flushed = 0

    @property
    def is_behind(self) -> bool:
        """Whether there are events that Redis does not have, or it does not know that the stream has ended."""
        return not self.dropped and (self._flushed < self.last or (self.ended and not self.settled))

    def _trim(self) -> None:
        count = 0
        while self._num_bytes > self._max_bytes and count < len(self._events) - 1:
            self._num_bytes -= len(self._events[count])
            count += 1
        if count:
            del self._events[:count]
            self._first += count

    def _tell(self, events: bytes, last: int) -> None:
        """Hand new events to the readers that wait, and wake those that do not take them; with no events, wake all.
        `last`: the number of the last event."""
        for reader in list(self._waiting):
            if not (events and reader.push(events, last)):
                woken = self._waiting.pop(reader)
                if not woken.done():
                    woken.set_result(None)


def split_events(batch: Batch, after: int) -> bytes:
    """Return the events of a batch whose numbers are above `after`."""
    if batch.first > after:
        return batch.body
    parts = batch.body.split(b"\n\n")
    return b"\n\n".join(parts[after + 1 - batch.first :])


MAX_OF_STREAM = 8
MAX_MORE_OF_TEAM = 64
"""Maximum number of readers of all streams of a team; further ones are refused with TooManyRequests. The first reader
of each stream does not count, since the number of streams is limited already."""


class Readers:
    """Counts the readers of all streams, and limits them by stream and by team."""

    def __init__(self) -> None:
        self._of_stream: Counter[str] = Counter()
        self._more_of_team: Counter[str] = Counter()

    def enter(self, team: str, stream: str) -> ReaderLease:
        """Count one more reader and return its lease. The caller must call `leave` on the lease; calling it twice does
        no harm. Raises TooManyRequests."""
        if self._of_stream[stream] >= MAX_OF_STREAM:
            raise too_many_readers(MAX_OF_STREAM)
        if self._of_stream[stream] and self._more_of_team[team] >= MAX_MORE_OF_TEAM:
            raise too_many_readers_of_team(MAX_MORE_OF_TEAM)
        self._more_of_team[team] += self._of_stream[stream] > 0
        self._of_stream[stream] += 1
        return ReaderLease(self, team, stream)

    def leave(self, team: str, stream: str) -> None:
        """Count one reader less of the stream."""
        self._of_stream[stream] -= 1
        self._more_of_team[team] -= self._of_stream[stream] > 0
        for counter, name in ((self._of_stream, stream), (self._more_of_team, team)):
            if not counter[name]:
                del counter[name]


class ReaderLease:
    """Holds the place of one reader that `Readers` counts. Only the first `leave` has an effect."""

    __slots__ = ("_readers", "_stream", "_team")

    def __init__(self, readers: Readers, team: str, stream: str) -> None:
        self._readers: Readers | None = readers
        self._team = team
        self._stream = stream

    def leave(self) -> None:
        """Give the place back."""
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.leave(self._team, self._stream)


LOOK_EVERY_S = 0.3
SHORTEST_S = 0.01


async def wait_until_unread(recording: Recording, log: StreamLog, grace_s: float) -> bool:
    """Wait until nobody has read the stream for `grace_s` seconds, here or at another gateway; then return True. Return
    False as soon as the stream has ended."""
    seen: bytes | None = None
    read_at = time.monotonic()
    while not recording.ended:
        now = time.monotonic()
        if recording.num_readers:
            read_at = now
        else:
            read_at = max(read_at, recording.left_at)
            try:
                sign = await log.signs(recording.stream)
            except StoreUnavailable:
                # Redis is away: assume that the stream is read elsewhere. The time limit of a request still holds.
                read_at = now
            else:
                if sign != seen:
                    seen, read_at = sign, now
                elif now - read_at >= grace_s:
                    return True
        await asyncio.sleep(max(SHORTEST_S, min(LOOK_EVERY_S, read_at + grace_s - now)))
    return False
