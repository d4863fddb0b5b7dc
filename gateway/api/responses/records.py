"""Encodes and decodes stored records of responses: the response, its input, and the ids of the responses before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.api.http.answers import EncodedArray
from gateway.api.intake.body import slices
from gateway.api.intake.decoding import let_loop_run
from gateway.api.media.attachments import Attachments
from gateway.api.media.sieve import MediaSieve
from gateway.api.responses.items import Item
from workers.protocol.framing import read_float

LONG_BYTES = 256 << 10
"""A record whose input is encoded already is completed on a thread if the input has more bytes: 32 MiB take 20 ms."""

PIECE_BYTES = 64 << 10
"""Maximum bytes of a record to decode in one call: at most 2,000 parts of items, which take a millisecond."""

_PLACE = b"\0"
"""Placeholder for an encoded input, which `encode_record` puts in its place. JSON never has this byte."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    response: dict[str, Any]
    """The response object that its caller got, or would get by retrieving it now."""
    input: tuple[Item, ...]
    """The input of this response, without the conversation before it. Item references are replaced by the items."""
    chain: tuple[str, ...] = ()
    """Ids of the responses before this one in its conversation, oldest first."""
    is_background: bool = False
    is_too_long: bool = False
    """Whether the prompt did not fit the model's context. Then its input is not stored: no request can continue it."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Return what this response adds to the conversation: its input and its output."""
        return (*self.input, *self.response["output"])


class NewRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that is about to be stored."""

    response: dict[str, Any]
    input: tuple[Item, ...] | bytes | msgspec.Raw
    """The input. Bytes are encoded already: a background response is stored three times, and encoded once."""
    chain: tuple[str, ...] = ()
    is_background: bool = False
    is_too_long: bool = False

    def too_long(self) -> NewRecord:
        """Return the record without input and chain, since the prompt did not fit: the caller needs only the error."""
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


def decode_record(raw: bytes, attachments: Attachments | None = None) -> Record:
    """Decode a stored record. `attachments`: gets the files of a long record's input, and tokens stand in their place;
    None: they stay base64. Raises msgspec.DecodeError.

    A long record is decoded in pieces, and the event loop may run between them. If a request refers to items of stored
    responses, its record can have half a million parts: decoding all in one call would hold up every stream for 0.5 s.
    """
    if len(raw) <= PIECE_BYTES:
        return _decode_short(raw)
    found = _decode_fields(raw)
    let_loop_run()
    given = found.input if attachments is None else _without_files(found.input, attachments)
    told = msgspec.structs.asdict(found) | {"response": _decode_parts(found.response), "input": _decode_parts(given)}
    return msgspec.convert(told, Record)


def _without_files(raw: msgspec.Raw, attachments: Attachments) -> msgspec.Raw:
    """Return the JSON with tokens in place of long files, which `attachments` gets."""
    sieve, data = MediaSieve(), bytes(raw)
    kept: list[bytes] = []
    for piece in slices(data):
        kept.append(sieve.feed(piece))
        let_loop_run()
    kept.append(sieve.finish())
    if not sieve.cuts:
        return raw
    attachments.add(sieve.cuts)
    return msgspec.Raw(b"".join(kept))


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
    """Yield the items of an array in groups of at most PIECE_BYTES; a longer item is a group of its own."""
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
    """Encode a record for Redis."""
    if not isinstance(record.input, bytes):
        return _encoded(record)
    before, after = _encoded(replace(record, input=msgspec.Raw(_PLACE))).split(_PLACE)
    # Joining releases the interpreter to other threads, as encoding does not.
    return b"".join((before, record.input, after))


async def written(record: Record | NewRecord) -> bytes:
    """Encode a record for Redis: on a thread if its input is long and already encoded, to keep the loop free."""
    if isinstance(record.input, bytes) and len(record.input) > LONG_BYTES:
        return await asyncio.to_thread(encode_record, record)
    return encode_record(record)
