"""Turns the bytes of a streamed answer into typed items, and checks that the answer is complete. Does no I/O.

After a break, `StreamReceiver` decides whether and when to reconnect: only if the caller asked for a `resume_grace`,
only if an event with an id has come, and only as long as the server keeps the stream.

Source: WHATWG HTML, "Server-sent events". `retry` is not read: how often to reconnect is the caller's decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from gateway.client.errors import ClientError, NotFound, StreamBroken, StreamGone, UnexpectedAnswer, stream_error
from gateway.client.request import StreamRequest, unexpected

MAX_EVENT_BYTES = 16 << 20


class SseEvent(NamedTuple):
    id: str
    """Id of this event; empty: it has none."""
    data: bytes


class EventTooLong(ValueError):
    """An event is longer than `MAX_EVENT_BYTES`."""


class SseReader:
    """Parses server-sent events from chunks that can end anywhere. Keeps at most one unfinished event in memory."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._id = ""
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that this chunk completes. Raises EventTooLong."""
        events = []
        for line in self._lines(chunk):
            if line:
                self._field(line)
                continue
            if self._data:
                events.append(SseEvent(self._id, b"\n".join(self._data)))
            self._id, self._data, self._size = "", [], 0
        if self._size + len(self._rest) > self._max_event_bytes:
            raise EventTooLong(f"a server-sent event grew past {self._max_event_bytes} bytes")
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, without their line ends."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        # A CR at the very end may be half of a CRLF.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        return [line.rstrip(b"\r\n") for line in lines]

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")


T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
DONE = b"[DONE]"


class StreamReceiver(Generic[T]):
    """The state of one streamed answer while it is received."""

    def __init__(self, request: StreamRequest[T], clock: Callable[[], float] = time.monotonic) -> None:
        self.request = request
        self.complete = False
        self.headers: Mapping[str, str] = {}
        """Response headers of the current or last connection."""
        self._clock = clock
        self._reader = SseReader()
        self._last_id = ""
        self._may_end = False
        self._broke_at: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def request_headers(self) -> dict[str, str]:
        headers = {"accept": "text/event-stream", "content-type": "application/json"}
        if self.request.resume_grace is not None:
            headers["x-resume-grace"] = str(self.request.resume_grace)
        if self._last_id:
            headers["last-event-id"] = self._last_id
        return headers

    def opened(self, headers: Mapping[str, str]) -> None:
        """Begin with a new connection. Drop the unfinished event of the last connection, if any: the server sends it
        again."""
        self.headers = headers
        self._reader = SseReader()

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Yield the items that a chunk completes. Raises AnswerError for an error event, and UnexpectedAnswer."""
        try:
            events = self._reader.feed(chunk)
        except EventTooLong as error:
            raise UnexpectedAnswer(f"the stream of {self.request.path} can't be read: {error}") from None
        for event in events:
            if self.complete:
                return
            self._last_id = event.id or self._last_id
            self._broke_at = None
            if event.data == DONE:
                self.complete = True
            else:
                yield self._item(event.data)

    def refused(self, error: ClientError) -> ClientError:
        """Return the error to raise for a refused connection: `error`, or StreamGone if a reconnect got a plain 404."""
        if self._last_id and isinstance(error, NotFound) and not isinstance(error, StreamGone):
            return StreamGone(error.message, status=error.status, detail=error.detail, headers=self.headers)
        return error

    def ended(self) -> None:
        """Record that the server has ended the response. Raises StreamBroken if the answer is not complete."""
        if not self.complete and not self._may_end:
            raise StreamBroken("the stream ended before the answer was complete")
        self.complete = True

    def pause_s(self, error: ClientError) -> float:
        """Return the seconds to wait before reconnecting. Raises StreamBroken if the stream can't be resumed."""
        now = self._clock()
        if self._broke_at is None:
            self._broke_at, self._pause_s = now, FIRST_PAUSE_S
        grace = self.request.resume_grace
        if grace is None:
            raise StreamBroken(f"{error}; resume_grace lets a stream go on after a broken connection") from error
        if not self._last_id:
            raise StreamBroken(f"{error}; no event with an id had come, so there is nothing to go on from") from error
        if now + self._pause_s - self._broke_at > grace:
            raise StreamBroken(f"{error}; could not go on within {grace} s (resume_grace)") from error
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s

    def _item(self, data: bytes) -> T:
        if (error := stream_error(data, self.headers)) is not None:
            raise error
        try:
            item = self.request.read(data)
        except msgspec.MsgspecError as why:
            raise unexpected(f"POST {self.request.path}", data, why) from None
        self._may_end = self.request.last(item)
        return item
