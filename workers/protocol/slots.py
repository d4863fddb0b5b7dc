"""What lies in a worker's slots, saved under a name, brought back, forgotten.

`GET /v1/slots` answers a list of `SlotInfo`. `POST /v1/slots/{id}` takes a `SlotAction` and answers `SlotSaved`,
`SlotRestored` or `SlotErased`. A slot holds the conversation that last ended in it, for the team and salt whose it was;
for everybody else it is empty. Names of the answers' fields: "POST /slots/{id_slot}" in tools/server/README.md of
llama.cpp.
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
    """Tokens that the answer may still have by its `max_tokens`; -1: without a bound, or nothing is known."""
    request_id: str
    tenant: str
    """Whose it is; empty: nobody's."""


class SlotAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    action: Literal["save", "restore", "erase"]
    tenant: str
    filename: Annotated[str, Meta(max_length=1024)] = ""
    """In the team's own folder. `erase` with one forgets the file and leaves the slot as it is."""
    salt: str = ""
    """The `cache_salt` of the conversation."""
    adapters: tuple[AdapterUse, ...] = ()
    """For `restore`: what the conversation was computed with."""


class SaveTimings(msgspec.Struct, frozen=True):
    save_ms: float


class RestoreTimings(msgspec.Struct, frozen=True):
    restore_ms: float


class SlotSaved(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is written for an empty slot, nor where nothing of its conversation is left."""

    id_slot: int
    filename: str
    n_saved: int
    """Tokens."""
    n_written: int
    """Bytes of the file."""
    n_left: int = 0
    """Tokens at the end of the conversation that are not in the file, since their KV is kept nowhere any more."""
    timings: SaveTimings


class SlotRestored(msgspec.Struct, frozen=True, kw_only=True):
    id_slot: int
    filename: str
    n_restored: int
    """Tokens."""
    n_read: int
    """Bytes of the file."""
    timings: RestoreTimings


class SlotErased(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id_slot: int
    n_erased: int
    """Tokens that the slot held. Those that other conversations share, or that are on disk, are not forgotten."""
    n_freed: int = 0
    """Bytes of the file that was erased; 0: it was the slot."""


decode_action = msgspec.json.Decoder(SlotAction).decode
decode_infos = msgspec.json.Decoder(list[SlotInfo]).decode
