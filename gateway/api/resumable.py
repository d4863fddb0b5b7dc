"""Keeps streamed answers going without their connection, and sends the rest to clients that come back."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import note_error, send_error, shape_of
from gateway.api.http.diagnostics import answer_headers, ping, request_log_of
from gateway.api.http.streaming import EventStream, chunk_writer_of, written
from gateway.api.intake.disconnect import CLIENT_GONE_STATUS, ClientGone, until_disconnect
from gateway.api.intake.intake import Body
from gateway.api.request_headers import ResumeOptions
from gateway.errors import PaddockError
from gateway.resume.reading import LocalReading, Reading
from gateway.resume.recording import Recording
from gateway.resume.recordings import Owner, Produce, Recordings
from gateway.telemetry.finish import finish_request
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from workers.tracing.span import read_context

HELD_PER_BYTE = 2
"""Bytes of memory per byte of events being sent. Each is held twice: as it was read, and in the connection's buffer."""


class Resumable:
    def __init__(self, recordings: Recordings, metrics: Metrics, ping_interval_s: float) -> None:
        self._recordings = recordings
        self._metrics = metrics
        self._ping_interval_s = ping_interval_s

    async def first(self, resume: ResumeOptions, produce: Produce, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a stream that outlives a broken connection, and send it."""
        reading = await self.begin(new_stream(), resume.owner, resume.grace_s, produce, request_log_of(scope))
        await self.follow(reading, scope, receive, send)

    async def begin(
        self, stream: str, owner: Owner, grace_s: float | None, produce: Produce, request_log: RequestLog
    ) -> LocalReading:
        """Begin a stream that `produce` writes. If its client leaves early, the request's log is finished when the
        stream ends."""

        async def write(recording: Recording) -> None:
            try:
                await produce(recording)
            finally:
                if request_log.handed_over:
                    request_log.status = request_log.status or (200 if recording.started else CLIENT_GONE_STATUS)
                    request_log.outcome = request_log.outcome or "client_gone"
                    finish_request(request_log, self._metrics)

        context = request_log.trace.context
        trace = "" if context is None else context.traceparent
        return await self._recordings.begin(stream, owner, write, grace_s, trace)

    async def follow(self, reading: LocalReading, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a stream that has just begun. If the client leaves early, the stream's writer finishes the log."""
        try:
            await self.send(reading, scope, receive, send)
        except ClientGone:
            request_log_of(scope).handed_over = not reading.recording.ended
            raise

    async def again(self, resume: ResumeOptions, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the rest of a stream. Its memory counts as this request's. Raises what `Recordings.open` raises."""
        body.raw = b""  # not needed any more: `resume` has its digest
        reading = await self._recordings.open(resume.stream, resume.after, resume.owner)
        await self.send(reading, scope, receive, send, holds=body.hold_at_least)

    async def send(
        self,
        reading: Reading,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        holds: Callable[[int], None] | None = None,
    ) -> None:
        """Send the whole response, with pings while there is nothing else to say. Closes `reading`.

        `holds` is called with the bytes of memory that events take while they are sent; its error ends the response."""
        try:
            request_log = request_log_of(scope)
            request_log.trace.add_link(read_context(reading.trace))
            pings = _Pings(request_log)
            stream = EventStream(send, lambda: answer_headers(request_log), pings.next, chunk_writer_of(scope))
            async with until_disconnect(receive):
                failure = await stream.pinged(_copy(reading, stream, pings, holds), self._ping_interval_s)
                if failure is None:
                    _note_told(request_log)
                    await stream.start()
                    await stream.end(b"")
                elif not stream.started:
                    await send_error(receive, send, failure, request_log, shape_of(scope))
                else:
                    # Left unfinished, the response makes the server close the connection: the client asks again.
                    request_log.status = 200
                    note_error(request_log, failure)
        finally:
            reading.close()


def new_stream() -> str:
    """Return a new stream id that nobody can guess."""
    return secrets.token_hex(16)


class _Pings:
    """Makes the pings of one response, whose events have ids."""

    __slots__ = ("_request_log", "follows_events")

    def __init__(self, request_log: RequestLog) -> None:
        self._request_log = request_log
        self.follows_events = False
        """Whether an event has been sent."""

    def next(self) -> bytes:
        """Return a ping; behind an event without the empty line. OpenAI's Python client keeps the last id and makes an
        event of such a line, on which it fails, since that has no data."""
        comment = ping(self._request_log)
        return comment.removesuffix(b"\n") if self.follows_events else comment


async def _copy(
    reading: Reading, stream: EventStream, pings: _Pings, holds: Callable[[int], None] | None
) -> PaddockError | None:
    """Send every event to the client. Return the error that prevented it, or None."""

    def push(events: bytes) -> bool:
        try:
            if holds is not None:
                holds(HELD_PER_BYTE * len(events))
        except PaddockError:
            return False  # raised again where it ends the response
        pings.follows_events = True
        return stream.write_now(events)

    try:
        while events := await reading.take(push):
            if reading.refusal is not None and not stream.started:
                return reading.refusal
            if holds is not None:
                holds(HELD_PER_BYTE * len(events))
            await stream.start()
            pings.follows_events = True
            await written(stream.write(events))
    except PaddockError as error:
        return error
    return None if stream.started else reading.refusal


def _note_told(request_log: RequestLog) -> None:
    """Record that the answer succeeded, unless the task that wrote the stream has recorded an outcome."""
    request_log.status, request_log.outcome = request_log.status or 200, request_log.outcome or "ok"
