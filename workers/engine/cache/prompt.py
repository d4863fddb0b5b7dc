"""The input of a call, what its cells are known by, and the path of a conversation through the prefix index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.engine.cache.names import Scope

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a sound in a prompt: cells that no tokens stand for. A prefix can be shared up to it or with it."""

    start: int
    """Its first cell."""
    num_cells: int
    num_positions: int
    """Positions that the model counts for it: no more than its cells, and fewer where positions have several parts."""
    digest: bytes
    """Hash of its contents: conversations share its cells only where this is the same."""

    def ids(self) -> Tokens:
        """Return what its cells are known by: numbers below 0, which no token has, made of its hash."""
        drawn = hashlib.shake_256(self.digest).digest(4 * self.num_cells)
        return np.frombuffer(drawn, dtype="<i4").astype(np.int32) | np.int32(-(1 << 31))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of a call, one cell after the other."""

    tokens: Sequence[int]
    """Tokens, begin token included where the model wants one; any number stands in the cells of media."""
    media: tuple[Media, ...] = ()
    """Media in order."""

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.tokens)

    def ids(self) -> Tokens:
        """Return what the cells are known by in the prefix index and in the names of saved blocks."""
        ids = np.array(self.tokens, dtype=np.int32) if self.media else np.asarray(self.tokens, dtype=np.int32)
        for one in self.media:
            ids[one.start : one.start + one.num_cells] = one.ids()
        return ids

    def position(self, cell: int) -> int:
        """Return the position of a cell that no media stand in, or of one that follows the prompt."""
        return cell - sum(one.num_cells - one.num_positions for one in self.media if one.start < cell)


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens of one conversation, with their scope."""

    tokens: Tokens
    scope: Scope
    num_public: int = 0
    """Tokens at the beginning that belong to everyone."""

    def scope_at(self, position: int) -> Scope:
        return self.scope.public if position < self.num_public else self.scope

    def run_end(self, position: int) -> int:
        """Return the position where the scope of `position` ends."""
        return min(self.num_public, len(self.tokens)) if position < self.num_public else len(self.tokens)


def common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two runs have in common at their beginning."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
