"""The prefix cache for a model with a sliding window whose cells behind it stay as long as nobody needs them.

llama.cpp keeps such cells with `swa_full`, but does not promise them: it gives those that no second sequence holds to
others, from the first one of the sequence up to the highest taken. A token that sees further back must not be computed
from what is left. So before cells are shared or saved, llama.cpp is asked where they begin. A prefix that lacks its
beginning serves calls that go on near its end, as most do; for others it is dropped, and they compute it.
"""

from __future__ import annotations

from workers.engine.cache.cached_sequence import NOWHERE, CachedSequence, Match
from workers.engine.cache.checkpoints import CheckpointCache
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prefix_tree import Block
from workers.llama.memory import Memory


def cache_class(memory: Memory) -> type[PrefixCache]:
    """Return the prefix cache for a kind of memory."""
    if not memory.kind.by_range:
        return CheckpointCache
    return WindowCellsCache if memory.window else PrefixCache


class WindowCellsCache(PrefixCache):
    """A prefix cache that looks which cells llama.cpp still has. Belongs to the engine's thread.

    Of what a sequence holds only the beginning is ever missing, since cells are given away from the first one on, and a
    range is put into a sequence only behind what it holds."""

    can_pack = False
    """A copy of cells that move could take the place of others in the middle of the same sequence."""

    def lookup(self, sequence: CachedSequence) -> Match:
        match = super().lookup(sequence)
        return match if self._serves(match) else Match(0, NOWHERE, ())

    def enter(self, sequence: CachedSequence) -> None:
        while not self._serves(match := super().lookup(sequence)):
            self._disown(match.holder)
        super().enter(sequence)

    def shift(self, sequence: CachedSequence, start: int, end: int, until: float) -> bool:
        """Shift the context, unless the window would reach over the dropped tokens to cells that may be missing."""
        if start and sequence.num_cells - end < self._memory.window:
            return False
        return super().shift(sequence, start, end, until)

    def _serves(self, match: Match) -> bool:
        return not match.num_held or self._memory.reaches_back(match.holder, match.num_held)

    def _disown(self, id_: int) -> None:
        """Take a sequence out of the index, so that its tokens are computed and entered anew by others."""
        if id_ in self._idle:
            self._free(id_)
        else:
            self.index.release(id_)
            self._live[id_].hide()

    def _settle(self, id_: int, sequence: CachedSequence) -> bool:
        """Enter a sequence whose call has ended into the index, if its cells can continue it."""
        num_cells, path = sequence.num_cells, sequence.path()
        if sequence.shifted or not self._memory.can_continue(id_, num_cells):
            return False
        while (known := self.index.extend(id_, path, num_cells)) < num_cells:
            other = self.index.match(path, num_cells).holder
            if self._memory.holds_from(other, known):
                return self._memory.holds_from(id_, known) and super()._settle(id_, sequence)
            self._disown(other)
        return True

    def _save(self, id_: int, start: int, end: int) -> Block | None:
        return super()._save(id_, start, end) if self._memory.holds_from(id_, start) else None

    def _drop_covered(self, by: int) -> None:
        if self._memory.holds_from(by, 0):
            super()._drop_covered(by)
