"""What is kept of a response: itself, what was asked, and the responses before it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.api.responses.items import Item


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    response: dict[str, Any]
    """As its caller got it, or would get it now."""
    input: tuple[Item, ...]
    """Its own input, references replaced by what they stand for."""
    chain: tuple[str, ...] = ()
    """Ids of the responses before it, the first one first."""
    is_background: bool = False
    is_too_long: bool = False
    """Its prompt did not fit the model's context, so nothing can follow it: its input was not kept."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Its part of the conversation."""
        return (*self.input, *self.response["output"])


class NewRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record that is to be kept, as it is written."""

    response: dict[str, Any]
    input: tuple[Item, ...] | msgspec.Raw
    """Raw: written before. A response in the background is kept three times."""
    chain: tuple[str, ...] = ()
    is_background: bool = False
    is_too_long: bool = False

    def too_long(self) -> NewRecord:
        """Return what is kept where the prompt did not fit: as much as its caller needs to learn why."""
        return replace(self, input=(), chain=(), is_too_long=True)


encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(Record).decode
