"""The stored record of a response: itself, its input, and the ids of the responses before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.api.http.answers import EncodedArray
from gateway.api.intake.decoding import let_loop_run
from gateway.api.responses.items import Item
from workers.protocol.framing import read_float

LONG_BYTES = 256 << 10
"""Bytes of an input beyond which its record is encoded on a thread: 32 MiB take 20 ms."""

PIECE_BYTES = 64 << 10
"""Bytes of a record that are decoded in one call: two thousand parts of items at most, which take a millisecond."""

_PLACE = b"\0"
"""Marks the place of such an input: JSON never has this byte."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    response: dict[str, Any]
    """The response as its caller got it, or would get it now."""
    input: tuple[Item, ...]
    """Its own input; references are replaced by the items that they stand for."""
    chain: tuple[str, ...] = ()
    """Ids of the responses before it, the first one first."""
    is_background: bool = False
    is_too_long: bool = False
    """Its prompt did not fit the model's context, so nothing can follow it: its input was not kept."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Return its part of the conversation."""
        return (*self.input, *self.response["output"])


class NewRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that is to be stored, as it is written."""

    response: dict[str, Any]
    input: tuple[Item, ...] | bytes | msgspec.Raw
    """The input; bytes were encoded before. A response in the background is stored three times."""
    chain: tuple[str, ...] = ()
    is_background: bool = False
    is_too_long: bool = False

    def too_long(self) -> NewRecord:
        """Return the record of a prompt that did not fit: as much as its caller needs to learn why."""
        return replace(self, input=(), chain=(), is_too_long=True)


class _Undecoded(msgspec.Struct, frozen=True, kw_only=True):
    """A record whose texts and items are not decoded yet."""

    response: msgspec.Raw
    input: msgspec.Raw
    chain: tuple[str, ...] = ()
    is_background: bool = False
    is_too_long: bool = False


_encoded = msgspec.json.Encoder(enc_hook=EncodedArray.raw).encode
_decode_short = msgspec.json.Decoder(Record, float_hook=read_float).decode
_decode_fields = msgspec.json.Decoder(_Undecoded).decode
_decode_value = msgspec.json.Decoder(float_hook=read_float).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


def decode_record(raw: bytes) -> Record:
    """Return a stored record. Raises msgspec.DecodeError.

    A long one is decoded a piece at a time, and on the decoding thread the event loop runs in between: references let
    one have half a million parts, which held the interpreter, and so every stream, for half a second in one call.
    """
    if len(raw) <= PIECE_BYTES:
        return _decode_short(raw)
    found = _decode_fields(raw)
    let_loop_run()
    told = msgspec.structs.asdict(found) | {
        "response": _decode_parts(found.response),
        "input": _decode_parts(found.input),
    }
    return msgspec.convert(told, Record)


def _decode_parts(raw: msgspec.Raw) -> Any:
    data = memoryview(raw)
    if len(data) > PIECE_BYTES and data[0] == ord("["):
        return [one for run in _runs(_decode_array(data)) for one in _decode_run(run)]
    if len(data) > PIECE_BYTES and data[0] == ord("{"):
        return {name: _decode_parts(value) for name, value in _decode_object(data).items()}
    value = _decode_value(data)
    let_loop_run()
    return value


def _runs(items: Sequence[msgspec.Raw]) -> Iterator[Sequence[msgspec.Raw]]:
    """Yield the items of an array, as many at a time as make a piece."""
    start, num_bytes = 0, 0
    for end, item in enumerate(items):
        num_bytes += len(memoryview(item))
        if num_bytes > PIECE_BYTES:
            if end > start:
                yield items[start:end]
            start, num_bytes = end, len(memoryview(item))
    yield items[start:]


def _decode_run(run: Sequence[msgspec.Raw]) -> list[Any]:
    if len(run) == 1:
        return [_decode_parts(run[0])]
    values: list[Any] = _decode_value(b"[%b]" % b",".join(run))
    let_loop_run()
    return values


def encode_record(record: Record | NewRecord) -> bytes:
    """Return a record as it is stored."""
    if not isinstance(record.input, bytes):
        return _encoded(record)
    before, after = _encoded(replace(record, input=msgspec.Raw(_PLACE))).split(_PLACE)
    # Joining releases the interpreter to other threads, as encoding does not.
    return b"".join((before, record.input, after))


async def written(record: Record | NewRecord) -> bytes:
    """Return a record as it is stored; one with a long input is made away from the event loop."""
    if isinstance(record.input, bytes) and len(record.input) > LONG_BYTES:
        return await asyncio.to_thread(encode_record, record)
    return encode_record(record)
