"""Server-sent events on the worker wire: writes frames, and cuts a stream of bytes back into frames.

Source: WHATWG HTML, "Server-sent events". Only what this wire uses is written (`event`, `id`, one line of `data`,
comments), but any conforming stream is read.
"""

from __future__ import annotations

from typing import NamedTuple

EVENTS_PATH = "/v1/events"
SUBMIT_PATH = "/v1/submit"
CANCEL_PATH = "/v1/cancel"
HEALTH_PATH = "/health"

ALIVE_EVENT = "alive"
"""Type of the list of living calls, sent first to a gateway whose `Last-Event-ID` cannot be honoured."""

MAX_FRAME_BYTES = 16 << 20

KEEP_ALIVE = b":\n\n"
KEEP_ALIVE_INTERVAL_S = 2.0
"""Seconds between a silent worker's comments, by which a gateway can tell silence from a dead connection."""


class Frame(NamedTuple):
    event: str
    """The event's type; empty for the default type."""
    id: str
    data: bytes


class FrameTooLong(ValueError):
    """A frame passed `MAX_FRAME_BYTES` without ending."""


def event_id(boot: str, step: int) -> str:
    return f"{boot}-{step}"


def parse_event_id(text: str) -> tuple[str, int] | None:
    """Return the parts of `<boot>-<step>`, or None for anything else."""
    boot, separator, step = text.rpartition("-")
    if not separator or not step.isascii() or not step.isdigit() or len(step) > 18:
        return None
    return boot, int(step)


def encode_frame(data: bytes, id: str = "", event: str = "") -> bytes:
    """Return one frame; `data` must not hold a line break (JSON written by msgspec never does)."""
    head = (f"event: {event}\n" if event else "") + (f"id: {id}\n" if id else "")
    return b"%bdata: %b\n\n" % (head.encode(), data)


class FrameReader:
    """Cuts a stream of chunks into frames; chunks may end anywhere. Holds at most one frame of bytes."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._begun = bytearray()
        """Bytes of the unfinished frame: one that comes byte by byte is not copied with each of them."""
        self._held = b""
        """A CR at the end of the last chunk, which may be half of a CRLF."""
        self._max_frame_bytes = max_frame_bytes

    def feed(self, chunk: bytes) -> list[Frame]:
        """Return the frames completed by this chunk, in order. Raises FrameTooLong."""
        if self._held or b"\r" in chunk:
            chunk = self._held + chunk
            self._held = b"\r" if chunk.endswith(b"\r") else b""
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blocks: list[bytes] = []
        if b"\n\n" in chunk or (chunk[:1] == b"\n" and self._begun[-1:] == b"\n"):
            *blocks, chunk = (bytes(self._begun) + chunk if self._begun else chunk).split(b"\n\n")
            self._begun.clear()
        self._begun += chunk
        if len(self._begun) > self._max_frame_bytes:
            raise FrameTooLong(f"a server-sent event grew past {self._max_frame_bytes} bytes")
        return [frame for block in blocks if (frame := _parse_block(block)) is not None]


def _parse_block(block: bytes) -> Frame | None:
    if block.startswith(b"id: "):
        # The frame that a worker writes once per step: an id, then one line of data.
        id_end = block.find(b"\n")
        if block.startswith(b"\ndata: ", id_end) and block.find(b"\n", id_end + 7) < 0:
            return Frame("", block[4:id_end].decode(), block[id_end + 7 :])
    event, id_, data = "", "", []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            data.append(value)
        elif name == b"id":
            id_ = value.decode()
        elif name == b"event":
            event = value.decode()
    return Frame(event, id_, b"\n".join(data)) if data else None


def gateway_process(gateway_id: str, start: str) -> str:
    """Return the name of one start of a gateway: each start numbers its calls from 1, so it has a name of its own."""
    return f"{gateway_id}.{start}"


def gateway_of(process: str) -> str:
    """Return the id of a gateway from the name of one start of it."""
    return process.rpartition(".")[0] or process
