"""Cuts a stream of bytes into server-sent events.

Source: WHATWG HTML, "Server-sent events". `retry` is not read: how often to reconnect is the caller's decision.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_EVENT_BYTES = 16 << 20


class SseEvent(NamedTuple):
    id: str
    """Id of this event; empty where it has none of its own."""
    data: bytes


class EventTooLong(ValueError):
    """An event passed `MAX_EVENT_BYTES` without ending."""


class SseReader:
    """Parses bytes as they come, cut anywhere. Holds at most one event."""

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
        """Return the whole lines so far, without their line ends."""
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
