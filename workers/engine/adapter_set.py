"""What one call computes with: LoRA weights that stand for names, with scales."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.llama.adapters import Adapter, AdapterFile
from workers.protocol.adapters import AdapterInfo, AdapterState


@dataclass(slots=True, eq=False)
class Entry:
    """One file's weights under one name. Everything but `name` and `file`'s digest changes under the shelf's lock."""

    name: str
    file: AdapterFile
    pinned: bool = False
    fixed: bool = False
    """Of the worker's settings: it stays as it is."""
    adapter: Adapter | None = None
    """Written on the engine's thread only."""
    num_calls: int = 0
    last_use: int = 0
    leaving: bool = False

    def info(self) -> AdapterInfo:
        """With the whole path of the file, which is not for others to see."""
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
    """What one call computes with. Two sets are equal when they compute the same."""

    key: bytes
    """Content hashes with scales, sorted; empty: no adapter. For the prefix index and for grouping."""
    uses: tuple[tuple[Entry, float], ...] = field(compare=False, repr=False)
    """In the order of the key; no scale is zero."""

    @property
    def entries(self) -> set[Entry]:
        return {entry for entry, _ in self.uses}


NO_ADAPTERS = AdapterSet(b"", ())
