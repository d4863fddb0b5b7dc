"""LoRA adapters of one worker: what is asked for by name, and what is told of each.

`POST /v1/adapters` takes `LoadAdapter` and answers `AdapterInfo`; `GET /v1/adapters` answers a list of `AdapterInfo`;
`DELETE /v1/adapters/{name}?wait_s=N` answers the last `AdapterInfo` of an adapter that is taken away, once no call uses
it any more or after N seconds (0 where nothing is said).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from workers.protocol.catalog import Name

ADAPTERS_PATH = "/v1/adapters"

MAX_WAIT_S = 600.0
"""Longest that an answer to `DELETE` may wait."""


class AdapterState(StrEnum):
    LOADED = "loaded"
    KNOWN = "known"
    """Checked, and not in memory: the next call that names it brings it there."""
    LEAVING = "leaving"
    """Taken away or replaced; freed when the last call that uses it ends."""
    GONE = "gone"
    """Taken away and freed."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name that is known already gets the new contents; running calls keep the old ones."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """GGUF file, relative to the worker's `adapters_dir`."""
    pinned: bool = False
    """Loaded at once, and never evicted."""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """What the file must hold: the contents that the fleet knows by this name. Empty: whatever lies there."""
    check: bool = False
    """Only tell whether it would be taken; nothing changes."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    """Of the file's contents: a name may be loaded again with others."""
    size: int
    """Bytes."""
    rank: int
    state: AdapterState
    pinned: bool
    fixed: bool = False
    """Of the worker's own settings: it can't be replaced or taken away while the worker runs."""
    calls: int
    """Accepted calls that use it and have not ended."""
    path: str = ""
    """Relative to the worker's `adapters_dir`; empty where the file does not lie there."""


decode_load = msgspec.json.Decoder(LoadAdapter).decode
decode_info = msgspec.json.Decoder(AdapterInfo).decode
decode_infos = msgspec.json.Decoder(list[AdapterInfo]).decode
