"""The wire types for one worker's LoRA adapters: requests to load and unload one, and the state of each.

`POST /v1/adapters` takes `LoadAdapter` and answers `AdapterInfo`; `GET /v1/adapters` answers a list of `AdapterInfo`;
`DELETE /v1/adapters/{name}?wait_s=N` unloads an adapter. It answers the adapter's last `AdapterInfo`, once no call uses
it any more or after N seconds (default 0).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from workers.protocol.catalog import Name

ADAPTERS_PATH = "/v1/adapters"

MAX_WAIT_S = 600.0
"""Most seconds that an answer to `DELETE` may wait."""


class AdapterState(StrEnum):
    LOADED = "loaded"
    KNOWN = "known"
    """Checked, and not in memory: the next call that names it loads it."""
    LEAVING = "leaving"
    """Unloaded or replaced; freed when the last call that uses it ends."""
    GONE = "gone"
    """Unloaded and freed."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/adapters`. A known name gets the new contents; running calls keep the old ones."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """GGUF file, relative to the worker's `adapters_dir`."""
    pinned: bool = False
    """Whether it is loaded at once, and never evicted."""
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 that the file must have: of the contents that the fleet knows by this name. Empty: any."""
    check: bool = False
    """Only answer whether it would be taken; change nothing."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    """SHA-256 of the file's contents: a name may be loaded again with others."""
    size: int
    """Bytes of the file."""
    rank: int
    state: AdapterState
    pinned: bool
    fixed: bool = False
    """Whether it comes from the worker's settings: it can't be replaced or unloaded while the worker runs."""
    calls: int
    """Accepted calls that use it and have not ended."""
    path: str = ""
    """Path relative to the worker's `adapters_dir`; empty where the file does not lie there."""


decode_load = msgspec.json.Decoder(LoadAdapter).decode
decode_info = msgspec.json.Decoder(AdapterInfo).decode
decode_infos = msgspec.json.Decoder(list[AdapterInfo]).decode
