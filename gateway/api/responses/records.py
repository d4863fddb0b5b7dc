"""The stored record of a response: itself, its input, and the ids of the responses before it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.api.answers import EncodedArray
from gateway.api.responses.items import Item
from workers.protocol.json_floats import read_float

LONG_BYTES = 256 << 10
"""Bytes of an input beyond which its record is encoded on a thread: 32 MiB take 20 ms."""

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


_encoded = msgspec.json.Encoder(enc_hook=EncodedArray.raw).encode
decode_record = msgspec.json.Decoder(Record, float_hook=read_float).decode


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
