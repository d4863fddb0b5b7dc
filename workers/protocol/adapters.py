"""LoRA adapters of one worker: what is asked for by name, and what is told of each.

`POST /v1/adapters` takes `LoadAdapter` and answers `AdapterInfo`; `GET /v1/adapters` answers a list of `AdapterInfo`;
`DELETE /v1/adapters/{name}` answers the last `AdapterInfo` of an adapter that is taken away.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from workers.protocol.catalog import Name

ADAPTERS_PATH = "/v1/adapters"


class AdapterState(StrEnum):
    LOADED = "loaded"
    EVICTED = "evicted"
    """Known and not in memory: the next call that names it brings it back."""
    LEAVING = "leaving"
    """Taken away or replaced; freed when the last call that uses it ends."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name that is known already gets the new contents; running calls keep the old ones."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """GGUF file, relative to the worker's `adapters_dir`."""
    pinned: bool = False
    """Never evicted."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    """Of the file's contents: a name may be loaded again with others."""
    size: int
    """Bytes."""
    rank: int
    state: AdapterState
    pinned: bool
    calls: int
    """Accepted calls that use it and have not ended."""


decode_load = msgspec.json.Decoder(LoadAdapter).decode
decode_info = msgspec.json.Decoder(AdapterInfo).decode
decode_infos = msgspec.json.Decoder(list[AdapterInfo]).decode
