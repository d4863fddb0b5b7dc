"""Begins, copies to Redis and ends every resumable stream that this gateway process writes.

A stream is written by a task of its own, so it goes on when its client's connection ends. It is given up when nobody,
here or at another gateway, has read it for `grace_s`; without such a limit it runs to its end. One flush to Redis
carries the new events of all streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.back_pressure import too_many_streams
from gateway.errors import InternalError, InvalidRequest, StoreUnavailable, StreamGone
from gateway.resume.reading import LocalReading, Reading, RemoteReading
from gateway.resume.recording import GONE, Readers, Recording, wait_until_unread
from gateway.store.outage import raise_if_cancelled
from gateway.store.streams import StreamBytes, StreamCount, StreamInfo, StreamLog, StreamQuota
from workers.protocol import keys

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.025
RETRY_S = 0.5
UNFLUSHED_S = 60.0
"""Seconds that an ended stream is kept in memory while Redis is away, to be written to Redis when it is back."""
CLOSE_S = 2.0
"""Seconds that an ending process waits for its streams to end. It then cancels those that have not ended, and waits for
as long again."""

Produce = Callable[[Recording], Awaitable[None]]
"""A function that writes a whole stream, the last event included. It is cancelled if the stream is given up."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a stream, who may read it again: its team, if it sends the request again that began the stream."""

    team: str
    request: str
    """Digest of the request that began the stream; empty: the team may read the stream again by any request."""


class Recordings:
    def __init__(self, stream_log: StreamLog, quota: StreamQuota, gateway: str, max_bytes: int) -> None:
        """`gateway`: id of this process; `max_bytes`: bytes of one stream's newest events kept for reading again."""
        self._log = stream_log
        self._quota = quota
        self._gateway = gateway
        self._max_bytes = max_bytes
        self._readers = Readers()
        self._running: dict[str, Recording] = {}
        """Stream id -> its recording, if Redis does not have all of the stream yet or the stream is read here."""
        self._over: dict[str, list[StreamBytes]] = {}
        """Team -> sizes of streams that have left `_running` but still count as running in Redis."""
        self._writers: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._some = asyncio.Event()
        self._away = False

    @property
    def busy(self) -> bool:
        """Whether any stream is being written, copied to Redis or read here."""
        return bool(self._running)

    async def run(self) -> None:
        """Flush the streams to Redis until cancelled. The tasks that write streams are children of this task."""
        renewed_at = float("-inf")
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                raise_if_cancelled()
                if not self._running and not self._over:
                    self._some.clear()
                    await self._some.wait()
                renew = time.monotonic() - renewed_at >= keys.STREAM_RENEW_S
                if await self._flush(renew=renew):
                    renewed_at = time.monotonic() if renew else renewed_at
                    await asyncio.sleep(FLUSH_EVERY_S)
                else:
                    await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Wait up to CLOSE_S for the streams that are being written, cancel the remaining ones and flush all to
        Redis."""
        if self._writers:
            await asyncio.wait(self._writers.values(), timeout=CLOSE_S)
        for stream in self._writers:
            self._cancel(stream)
        if self._writers:
            await asyncio.wait(self._writers.values(), timeout=CLOSE_S)
        while await self._flush(renew=False):
            if not any(recording.is_behind for recording in self._running.values()):
                return

    async def begin(
        self, stream: str, owner: Owner, produce: Produce, grace_s: float | None, trace: str = ""
    ) -> LocalReading:
        """Start a stream and return a reader at its beginning. `grace_s`: seconds without readers after which the
        stream is given up; None: never.

        Once this returns, other gateways can find the stream, unless Redis is away: then only this gateway can resume
        it. Raises TooManyStreams."""
        if self._tasks is None:
            raise RuntimeError("streams are begun while `run` runs")
        recording = Recording(stream, StreamInfo(owner.team, owner.request, self._gateway, trace), self._max_bytes)
        try:
            count = await self._quota.begin(owner.team, stream)
            self._share(recording, count)
            if count is not None:
                await self._log.forget(count.made_room)
            await self._write([recording], renew=True)
        except StoreUnavailable:
            log.warning("a stream began that only this gateway can go on with: Redis does not answer")
            self._share(recording, self._counted_here(owner.team))
        reading = LocalReading(recording, 0, self._readers.enter(owner.team, stream))
        self._running[stream] = recording
        self._some.set()
        self._writers[stream] = self._tasks.create_task(self._carry(recording, produce))
        if grace_s is not None:
            self._tasks.create_task(self._watch(recording, grace_s))
        return reading

    async def open(self, stream: str, after: int, owner: Owner) -> Reading:
        """Return a reader of a stream's events after number `after`; the caller closes it.

        Raises StreamGone, InvalidRequest (the stream belongs to another request), TooManyRequests, StoreUnavailable."""
        recording = self._running.get(stream)
        head = recording.head if recording is not None else await self._log.head(stream)
        if head is None or head.team != owner.team:
            raise StreamGone(GONE)
        if owner.request and head.request != owner.request:
            raise InvalidRequest(
                "`Last-Event-ID` is of another request. Send the same method, path and body as the first time."
            )
        if recording is None:
            return RemoteReading(self._log, stream, after, head.trace, self._readers.enter(head.team, stream))
        recording.check_kept(after)
        return LocalReading(recording, after, self._readers.enter(head.team, stream))

    async def alive(self, stream: str) -> bool:
        """Return whether the stream is being written, or still kept, in this process or in Redis."""
        return stream in self._running or await self._log.head(stream) is not None

    async def is_over(self, stream: str) -> bool:
        """Return whether nothing more will be written to the stream, by this gateway or another."""
        recording = self._running.get(stream)
        if recording is not None:
            return recording.ended
        return await self._log.head(stream) is None or await self._log.has_ended(stream)

    async def stop(self, stream: str) -> None:
        """End a stream. If another gateway writes it, that gateway ends it within `keys.STREAM_RENEW_S`."""
        if not self._cancel(stream):
            await self._log.ask_to_end(stream)

    async def _carry(self, recording: Recording, produce: Produce) -> None:
        try:
            await produce(recording)
        except Exception:  # the task's edge: a stream that breaks ends no other
            log.exception("a stream broke")
            recording.refusal = InternalError("Something broke in the gateway; its log has more.")
        finally:
            recording.end()
            self._writers.pop(recording.stream, None)

    async def _watch(self, recording: Recording, grace_s: float) -> None:
        if await wait_until_unread(recording, self._log, grace_s):
            recording.dropped = True
            self._cancel(recording.stream)

    async def _flush(self, *, renew: bool) -> bool:
        """Write all new events to Redis, remove the streams that are done from memory, and report the bytes of each
        team (`_charge`). Return whether Redis took the events."""
        try:
            await self._write(list(self._running.values()), renew=renew)
        except StoreUnavailable as error:
            if not self._away:
                log.warning("streams can be resumed at their own gateway only: %s", error.__cause__)
            self._away = True
        else:
            self._away = False
        for recording in [one for one in self._running.values() if _done(one)]:
            del self._running[recording.stream]
            state: Literal["gone", "ended"] = "gone" if recording.dropped else "ended"
            self._over.setdefault(recording.head.team, []).append(
                StreamBytes(recording.stream, recording.num_bytes, state)
            )
        teams = {one.head.team for one in self._running.values()} if renew else set()
        await asyncio.gather(*(self._charge(team, renew=renew) for team in teams.union(self._over)))
        return not self._away

    async def _charge(self, team: str, *, renew: bool) -> None:
        """Report to Redis how many bytes the team's ended streams hold here. With `renew`, also report its running
        streams, and set anew how many bytes each of them may keep."""
        running = [one for one in self._running.values() if one.head.team == team] if renew else []
        over = self._over.get(team, [])
        held = [*over, *(StreamBytes(one.stream, one.num_bytes, "running") for one in running)]
        try:
            count = await self._quota.note(team, held)
            await self._log.forget(count.made_room)
        except StoreUnavailable:
            count = StreamCount(len(running), ())
        else:
            # Delete only what was reported: further streams can have ended meanwhile.
            del over[: len(held) - len(running)]
            if not over:
                self._over.pop(team, None)
        for recording in running:
            self._share(recording, count)

    def _counted_here(self, team: str) -> StreamCount | None:
        """Return the count of a team's running streams at this gateway, a new one included; None: the team already has
        as many as it may (max_streams). Used while Redis is away."""
        num_running = sum(one.head.team == team for one in self._running.values())
        return StreamCount(num_running + 1, ()) if num_running < self._quota.bounds_of(team).max_streams else None

    def _share(self, recording: Recording, count: StreamCount | None) -> None:
        """Set how many bytes the stream may keep: an equal part of its team's bytes, within the bounds for one stream.
        `count`: the team's running streams; None: the team may have no more, so raise TooManyStreams."""
        bounds = self._quota.bounds_of(recording.head.team)
        if count is None:
            raise too_many_streams(bounds.max_streams, bounds.streams_limit)
        recording.keep_at_most(min(self._max_bytes, bounds.share(count.num_running)))

    async def _write(self, recordings: Sequence[Recording], *, renew: bool) -> None:
        for recording in recordings:
            if recording.dropped and recording.ended:
                await self._log.forget((recording.stream,))
                recording.settled = True
        pending_write = [(one, write) for one in recordings if (write := one.pending_write(renew=renew)) is not None]
        if not pending_write:
            return
        renewed = await self._log.write([write for _, write in pending_write])
        for recording, write in pending_write:
            if recording.stream in renewed.lost:
                recording.mark_lost()
            else:
                recording.mark_written(write)
            if recording.stream in renewed.unwanted:
                self._cancel(recording.stream)

    def _cancel(self, stream: str) -> bool:
        """Cancel the task that writes the stream. Return False if no task of this process writes it."""
        writer = self._writers.get(stream)
        # A second cancellation would interrupt its clean-up.
        if writer is not None and not writer.cancelling():
            writer.cancel()
        return writer is not None


def _done(recording: Recording) -> bool:
    """Return whether a stream can be dropped from memory: nobody reads it here, and Redis has it or has been away for
    UNFLUSHED_S."""
    is_kept = recording.settled or (recording.ended and time.monotonic() - recording.ended_at > UNFLUSHED_S)
    return is_kept and not recording.num_readers
