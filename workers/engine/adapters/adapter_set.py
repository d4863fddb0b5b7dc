"""The set of LoRA adapters that one call computes with: named weights with scales."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.llama.adapters import Adapter, AdapterFile
from workers.protocol.queries import AdapterInfo, AdapterState


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter: a file's weights under a name. All but `name` and `file`'s digest changes under the shelf's lock."""

    name: str
    file: AdapterFile
    pinned: bool = False
    fixed: bool = False
    """Whether it comes from the worker's settings, so that it can't be replaced or unloaded."""
    adapter: Adapter | None = None
    """The weights in memory. Written on the engine's thread only."""
    num_calls: int = 0
    last_use: int = 0
    leaving: bool = False

    def info(self) -> AdapterInfo:
        """Return the adapter's description, with the whole path of its file, which callers must not see."""
        state = AdapterState.KNOWN if self.adapter is None else AdapterState.LOADED
        return AdapterInfo(
            name=self.name,
            sha256=self.file.digest.hex(),
            size=self.file.size,
            rank=self.file.rank,
            state=AdapterState.LEAVING if self.leaving else state,
            pinned=self.pinned,
            fixed=self.fixed,
            calls=self.num_calls,
            path=str(self.file.path),
        )


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of one call with their scales. Two sets are equal when they compute the same."""

    key: bytes
    """Content hashes with scales, sorted; empty: no adapter. The prefix index and the grouping of calls use it."""
    uses: tuple[tuple[Entry, float], ...] = field(compare=False, repr=False)
    """Adapters with their scales, in the order of the key; no scale is zero."""

    @property
    def entries(self) -> set[Entry]:
        return {entry for entry, _ in self.uses}


NO_ADAPTERS = AdapterSet(b"", ())
