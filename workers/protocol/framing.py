"""Writes and reads the worker wire's server-sent events, and its JSON.

A frame is one server-sent event. Only the fields that this wire uses are written (`event`, `id`, one line of `data`,
comments), but any conforming stream is read. Source: WHATWG HTML, "Server-sent events".

Encoding megabytes of JSON in one call would hold the interpreter's lock and stop all streams, so long messages are
encoded in parts. Joined, the parts are what `msgspec.json.encode` returns; between two parts other tasks of the event
loop and other threads can run. `marked_parts` adds blanks by which `workers.protocol.pieces` finds the parts of a long
message again. `read_float` keeps callers' numbers from holding the interpreter for long.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple

import msgspec

EVENTS_PATH = "/v1/events"
SUBMIT_PATH = "/v1/submit"
CANCEL_PATH = "/v1/cancel"
HEALTH_PATH = "/health"

ALIVE_EVENT = "alive"
"""Type of the event that lists the calls the worker has; sent first if a gateway's `Last-Event-ID` can't be resumed."""

MAX_FRAME_BYTES = 16 << 20

KEEP_ALIVE = b":\n\n"
KEEP_ALIVE_INTERVAL_S = 2.0
"""Seconds between the comments that a worker with no events sends, so that a gateway notices a dead connection."""


class Frame(NamedTuple):
    event: str
    """The event's type; empty for the default type."""
    id: str
    data: bytes


class FrameTooLong(ValueError):
    """A frame grew past its maximum size without ending."""


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
    """Cuts a stream of chunks into frames; chunks may end anywhere. Keeps the bytes of one unfinished frame at most."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._begun = bytearray()
        """Bytes of the unfinished frame. A bytearray, so that a chunk is added without copying the frame."""
        self._held = b""
        """The CR that ended the last chunk, which may be the first half of a CRLF; empty: there was none."""
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
    """Return the name of one process of a gateway. `start` makes it unique: each process numbers its calls from 1, and
    a restarted gateway must not be taken for its forerunner."""
    return f"{gateway_id}.{start}"


def gateway_of(process: str) -> str:
    """Return the gateway's id from the name of one of its processes (`gateway_process`)."""
    return process.rpartition(".")[0] or process


PART_CHARS = 128 << 10
"""Maximum size, as `is_long` counts it, of a message that is encoded in one call; that takes a millisecond at most."""
RUN_ITEMS = 1024
"""Maximum number of items of a long list or object that are copied and measured at once."""
ITEM_CHARS = 6
"""Characters that `is_long` counts for each value and each name in a message, on top of the lengths of texts."""
RUN_NUMBERS = 8192
"""Maximum count of numbers from an array that are encoded in one call."""
BASE64_CHARS = 4
"""Characters of base64 that stand for a group of bytes."""
BASE64_GROUP = 3
"""Bytes in a group of base64. The base64 of two pieces can be joined if the first piece is a multiple of this."""

OPENS, CLOSES, CUT = b"\n", b"\r", b"\t"
"""Blanks before and behind each long value, and between two runs of items of a long list or object. Otherwise JSON that
msgspec writes has no blanks, and none of these can stand within a text: they are escaped there."""
_MARKS = (OPENS, CLOSES, CUT)

_PLACE = b"\0"
"""Byte that stands for a long field until that field is encoded. It can't occur in JSON."""
_TEXTS = frozenset({str, bytes})
_SIMPLE = frozenset({str, bytes, int, float, bool, type(None)})


def _listed(value: Any) -> list[Any]:
    """Return an `array` as a list: its JSON is that of the list. Raises TypeError for values of other types."""
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON")


encode = msgspec.json.Encoder(enc_hook=_listed).encode
"""Encodes a message in one call, however long it is. Raises TypeError."""


def json_parts(message: Any) -> Iterator[bytes]:
    """Yield a message's JSON in parts of about `PART_CHARS`; a short message is one part."""
    return _joined(part for part in _parts(message) if part not in _MARKS)


def marked_parts(message: Any) -> Iterator[bytes]:
    """Yield a message's JSON as `json_parts` does, with marks by which `PieceDecoder` reads a long one in pieces."""
    return _joined(_parts(message))


def struct_parts(message: msgspec.Struct, fields: Mapping[str, Iterator[bytes]]) -> Iterator[bytes]:
    """Yield a struct's JSON in parts. `fields`: name of a field -> the parts of the JSON to write as its value."""
    return _joined(_struct(message, fields))


def base64_parts(buffers: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the base64 of all buffers together, as one JSON string, in parts."""
    yield b'"'
    rest = b""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), PART_CHARS):
            piece = rest + view[start : start + PART_CHARS].tobytes()
            end = len(piece) - len(piece) % BASE64_GROUP
            rest = piece[end:]
            yield base64.b64encode(piece[:end])
    yield base64.b64encode(rest) + b'"'


def is_long(message: Any) -> bool:
    """Return whether a message has to be encoded in several parts. Stops measuring when the answer is yes."""
    left, level = PART_CHARS, [message]
    while level:
        left -= sum([len(one) for one in level if type(one) in _TEXTS])
        inner: list[Any] = []
        for one in [one for one in level if type(one) not in _SIMPLE]:
            if isinstance(one, msgspec.Struct):
                inner += msgspec.structs.astuple(one)
            elif isinstance(one, list | tuple | dict):
                if ITEM_CHARS * len(one) > left:
                    return True
                inner += one
                inner += one.values() if isinstance(one, dict) else ()
            elif isinstance(one, array):
                left -= ITEM_CHARS * len(one)
        left -= ITEM_CHARS * len(inner)
        if left < 0:
            return True
        level = inner
    return False


def _parts(value: Any) -> Iterator[bytes]:
    """Yield a value's JSON and, each as a part of its own, the marks of a long one."""
    if not is_long(value):
        yield encode(value)
        return
    yield OPENS
    yield from _long_parts(value)
    yield CLOSES


def _long_parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, str):
        yield from _text(value)
    elif isinstance(value, bytes):
        yield from base64_parts((value,))
    elif isinstance(value, array):
        yield from _numbers(value)
    elif isinstance(value, list | tuple):
        yield from _in_runs(b"[", value, _items, b"]")
    elif isinstance(value, dict):
        yield from _in_runs(b"{", value.items(), _members, b"}")
    elif isinstance(value, msgspec.Struct):
        long = {name: field for name in value.__struct_fields__ if is_long(field := getattr(value, name))}
        yield from _struct(value, {name: _parts(field) for name, field in long.items()})
    else:
        yield encode(value)


def _text(text: str) -> Iterator[bytes]:
    """Yield a text's JSON in parts: the JSON of a character does not depend on the characters beside it."""
    yield b'"'
    for start in range(0, len(text), PART_CHARS):
        yield encode(text[start : start + PART_CHARS])[1:-1]
    yield b'"'


def _numbers(numbers: array[Any]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(numbers), RUN_NUMBERS):
        if start:
            yield b","
            yield CUT
        yield encode(numbers[start : start + RUN_NUMBERS])[1:-1]
    yield b"]"


def _struct(message: msgspec.Struct, fields: Mapping[str, Iterator[bytes]]) -> Iterator[bytes]:
    names = [name for name in message.__struct_fields__ if name in fields]
    marked = msgspec.structs.replace(message, **dict.fromkeys(names, msgspec.Raw(_PLACE)))
    first, *others = encode(marked).split(_PLACE)
    yield first
    for name, part in zip(names, others, strict=True):
        yield from fields[name]
        yield part


def _in_runs(
    begins: bytes, items: Iterable[Any], encoded: Callable[[Sequence[Any]], Iterator[bytes]], ends: bytes
) -> Iterator[bytes]:
    """Yield a list's or object's JSON, `RUN_ITEMS` items at a time: copying millions at once would take long."""
    yield begins
    left, is_first = iter(items), True
    while run := list(islice(left, RUN_ITEMS)):
        if not is_first:
            yield b","
            yield CUT
        yield from encoded(run)
        is_first = False
    yield ends


def _items(run: Sequence[Any]) -> Iterator[bytes]:
    if not is_long(run):
        yield encode(run)[1:-1]
    elif len(run) == 1:
        yield from _parts(run[0])
    else:
        yield from _halves(run, _items)


def _members(run: Sequence[tuple[str, Any]]) -> Iterator[bytes]:
    if not is_long(run):
        yield encode(dict(run))[1:-1]
    elif len(run) == 1:
        ((name, value),) = run
        yield from _parts(name)
        yield b":"
        yield from _parts(value)
    else:
        yield from _halves(run, _members)


def _halves(run: Sequence[Any], encoded: Callable[[Sequence[Any]], Iterator[bytes]]) -> Iterator[bytes]:
    middle = len(run) // 2
    yield from encoded(run[:middle])
    yield b","
    yield CUT
    yield from encoded(run[middle:])


def _joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes of `parts` in larger parts: each one but the last has at least `PART_CHARS` bytes."""
    held: list[bytes] = []
    num_bytes = 0
    for part in parts:
        held.append(part)
        num_bytes += len(part)
        if num_bytes >= PART_CHARS:
            yield b"".join(held)
            held, num_bytes = [], 0
    if held:
        yield b"".join(held)


def read_float(text: str) -> float:
    """Return the value of a number with a fraction or an exponent. Decoders of callers' JSON have it as `float_hook`.

    Raises msgspec.DecodeError for a number out of the range of floats.

    msgspec's own parser takes 25 us for a number close to that range's limits (`2.2250738585072011e-308`): ten seconds
    for 8 MiB of them, all with the interpreter's lock held. This takes a tenth of that, and other threads can run."""
    value = float(text)
    if not isfinite(value):
        raise msgspec.DecodeError("Number out of range")
    return value
