"""The wire types for a worker's slots: list them, save a conversation under a name, restore or erase it.

`GET /v1/slots` answers a list of `SlotInfo`. `POST /v1/slots/{id}` takes a `SlotAction` and answers `SlotSaved`,
`SlotRestored` or `SlotErased`. A slot holds the conversation that last ended in it, for the team and salt that owned
it; for everybody else it is empty. Names of the answers' fields: "POST /slots/{id_slot}" in tools/server/README.md
of llama.cpp.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workers.protocol.requests import AdapterUse

SLOTS_PATH = "/v1/slots"


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One slot: its running call, else the conversation that it holds."""

    id: int
    n_ctx: int
    """Longest single conversation, tokens."""
    is_processing: bool
    n_prompt_tokens: int
    n_decoded: int
    """Tokens of the answer so far."""
    n_remain: int = -1
    """Tokens that the answer may still have by its `max_tokens`; -1: no bound, or unknown."""
    request_id: str
    tenant: str
    """Team that owns the call or conversation; empty: none."""


class SlotAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    action: Literal["save", "restore", "erase"]
    tenant: str
    filename: Annotated[str, Meta(max_length=1024)] = ""
    """File name in the team's own folder. `erase` with one removes the file and leaves the slot as it is."""
    salt: str = ""
    """The `cache_salt` of the conversation."""
    adapters: tuple[AdapterUse, ...] = ()
    """For `restore`: the adapters that the conversation was computed with."""


class SaveTimings(msgspec.Struct, frozen=True):
    save_ms: float


class RestoreTimings(msgspec.Struct, frozen=True):
    restore_ms: float


class SlotSaved(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `save`. Nothing is written for an empty slot, nor where none of its conversation is left."""

    id_slot: int
    filename: str
    n_saved: int
    """Tokens in the file."""
    n_written: int
    """Bytes of the file."""
    n_left: int = 0
    """Tokens at the end of the conversation that are not in the file, since their KV is kept nowhere any more."""
    timings: SaveTimings


class SlotRestored(msgspec.Struct, frozen=True, kw_only=True):
    id_slot: int
    filename: str
    n_restored: int
    """Tokens restored."""
    n_read: int
    """Bytes of the file."""
    timings: RestoreTimings


class SlotErased(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id_slot: int
    n_erased: int
    """Tokens that the slot held. Those that other conversations share, or that are on disk, stay."""
    n_freed: int = 0
    """Bytes of the erased file; 0: the slot was erased."""


decode_action = msgspec.json.Decoder(SlotAction).decode
decode_infos = msgspec.json.Decoder(list[SlotInfo]).decode
