"""The prefix cache for memory that can be cut at certain lengths only: sliding windows, recurrent states, mixtures.

Such a memory can continue a conversation only at lengths where a checkpoint was saved: at the end of a prompt and of an
answer, and at the token where another prompt, perhaps still waiting, branches off. Attention cells are shared as in
`workers.engine.cache.prefix_cache`, and the rest comes from the checkpoint. A prefix that leaves the KV cache is saved
as one whole state.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from workers.engine.cache.cached_sequence import NOWHERE, CachedSequence, Checkpoint, Match, Restore
from workers.engine.cache.prefix_cache import UNSAVED, PrefixCache
from workers.engine.cache.prefix_tree import Block, is_fork
from workers.engine.cache.prompt import Path
from workers.engine.pace import MOVE_S
from workers.llama.memory import MemoryKind
from workers.llama.native import StateUnusable

MIN_STOP_TOKENS = 32
"""A checkpoint at the end of a shared prefix is saved only if the last checkpoint is at least this many tokens before:
each one cuts a prompt in two and copies a state."""

FORK_SHARE = 1 / 16
"""The whole state of a shared prefix is saved only if it takes at most this part of the RAM tier."""


class CheckpointCache(PrefixCache):
    """A prefix cache with checkpoints, for the engine's thread. Tokens are computed if their state can't be loaded."""

    needs_stops = True
    can_pack = False

    def lookup(self, sequence: CachedSequence) -> Match:
        found = self._find(sequence)
        if found.block is None or found.holder != NOWHERE:
            return Match(found.end, found.holder, ())
        return Match(0, NOWHERE, (Restore(found.block, 0, found.end),))

    def enter(self, sequence: CachedSequence) -> None:
        found = self._find(sequence)
        known = self.index.num_common(sequence.path(), sequence.num_known - 1)
        known = sequence.prompt.floor(known)
        if sequence.cache_prompt and known - found.end >= MIN_STOP_TOKENS:
            sequence.stops.add(known)
        self._give_way(sequence, found)
        sequence.id = self._new_id(found.holder)
        sequence.num_cells = 0
        self._live[sequence.id] = sequence
        self._memory.lay_out(sequence.id, sequence.positions)
        if found.block is None:
            return
        if found.holder == NOWHERE:
            sequence.restores.append(Restore(found.block, 0, found.end))
        else:
            self._take_up(sequence, found, found.block)

    def restore(self, sequence: CachedSequence) -> None:
        part = sequence.restores.popleft()
        started = time.perf_counter()
        try:
            if not self.make_room(part.end):
                return
            self._memory.load(sequence.id, part.block.state, sequence.positions)
        except StateUnusable:
            self._discard(part.block)
            return
        if not self._arrive(sequence, part.end):
            self._discard(part.block)
            return
        self.ram.touch(part.block)
        self.num_restored += part.end
        sequence.num_restored += part.end
        self._pace.note_restore(part.end, time.perf_counter() - started)

    def reached(self, sequence: CachedSequence) -> None:
        """Save a checkpoint now that the prompt is computed up to its end, or to one of `sequence.stops` within it."""
        is_stop = sequence.num_cells in sequence.stops
        sequence.stops.discard(sequence.num_cells)
        if sequence.cache_prompt and not sequence.shifted and self._mark(sequence.id, sequence) and is_stop:
            self._save_fork(sequence.id, sequence.num_cells)

    def truncate(self, sequence: CachedSequence, num_cells: int, *, is_draft: bool = False) -> bool:
        if sequence.id == NOWHERE or num_cells >= sequence.num_cells:
            return True
        # Of other tokens than those of the last step there are no older states, whatever llama.cpp says.
        is_able = is_draft and sequence.num_cells - num_cells <= self._memory.most_cut
        if not is_able or not self._memory.cut(sequence.id, num_cells, -1):
            return False
        self.index.release(sequence.id, num_cells)
        sequence.num_cells = num_cells
        return True

    def copies(self, path: Path, start: int, end: int) -> Iterator[Block]:
        """Yield a copy of the whole state saved for the longest part of the path's first `end` tokens, or nothing."""
        if start:
            return
        if (id_ := self._idle_at(path, end)) is not None:
            yield Block(0, end, self._memory.save(id_))
            return
        found = self.index.match_checkpoint(path, end)
        if found.block is not None and found.holder == NOWHERE:
            yield Block(0, found.end, found.block.state)

    def state_size(self, path: Path, end: int) -> int:
        id_ = self._idle_at(path, end)
        return 0 if id_ is None else self._memory.state_size(id_)

    def _idle_at(self, path: Path, end: int) -> int | None:
        """Return the idle sequence that holds exactly the path's first `end` tokens, or None."""
        of_it = (id_ for id_ in self._idle if self.index.held_by(id_) == self.index.held_in(id_, path) == end)
        return next(of_it, None)

    def check_cells(self) -> None:
        self._check_ids()
        held = {id_: one.num_cells for id_, one in self._live.items()}
        held |= {id_: self.index.held_by(id_) for id_ in self._idle}
        for id_, num_cells in held.items():
            self._check_sequence(id_, num_cells)

    def _find(self, sequence: CachedSequence) -> Checkpoint:
        self._enter_live(sequence)
        nothing = Checkpoint(0, NOWHERE, None)
        if sequence.shifted:
            return nothing
        found = self.index.match_checkpoint(sequence.path(), sequence.num_known - 1)
        return found if found.holder != NOWHERE or self._pace.restore_pays else nothing

    def _give_way(self, sequence: CachedSequence, found: Checkpoint) -> None:
        """Evict idle prefixes with tokens that this sequence will compute, since the index can hold each token once."""
        path = sequence.path()
        for id_ in [id_ for id_ in self._idle if id_ != found.holder]:
            if self.index.held_in(id_, path) > found.end:
                self._evict(id_, time.perf_counter() + MOVE_S)

    def _take_up(self, sequence: CachedSequence, found: Checkpoint, block: Block) -> None:
        self._memory.share(found.holder, sequence.id, 0, found.end)
        try:
            self._memory.load_part(sequence.id, block.state)
        except StateUnusable:
            self._discard(block)
            return
        self.ram.touch(block)
        if self._memory.can_continue(sequence.id, found.end):
            self.index.share(sequence.id, sequence.path(), found.end)
            sequence.num_cells = found.end
            self._drop_covered(sequence.id)
        else:
            self._memory.remove(sequence.id)

    def _arrive(self, sequence: CachedSequence, end: int) -> bool:
        if not self._memory.can_continue(sequence.id, end):
            self._memory.remove(sequence.id)
            return False
        sequence.num_cells = end
        self.index.extend(sequence.id, sequence.path(), end)
        return True

    def _settle(self, id_: int, sequence: CachedSequence) -> bool:
        """Enter a sequence whose call has ended into the index. Return False if some of its tokens are there already,
        for other sequences: in this kind of memory, the sequence can't use their cells in place of its own."""
        if self.index.extend(id_, sequence.path(), sequence.num_cells) < sequence.num_cells:
            return False
        self._mark(id_, sequence)
        return True

    def _mark(self, id_: int, sequence: CachedSequence) -> bool:
        """Save a checkpoint of the sequence's present state. Return False if there is no RAM tier, if memory is short,
        or if other sequences computed some of the same tokens."""
        if not self.ram.max_bytes or self.index.extend(id_, sequence.path(), sequence.num_cells) < sequence.num_cells:
            return False
        try:
            checkpoint = self._checkpoint(id_, sequence.num_cells)
        except UNSAVED as error:
            self._note_unsaved(sequence.num_cells, error)
            return False
        self.ram.add(*checkpoint)
        return True

    def _checkpoint(self, id_: int, end: int) -> tuple[Block, list[Block]]:
        """Save a checkpoint and enter it in the index. Return the checkpoint and the blocks that it replaces."""
        if self._memory.kind is MemoryKind.RECURRENT:  # the state is all there is: it needs no holder's cells
            block = Block(0, end, self._memory.save(id_))
            return block, self.index.store(id_, block, self._spared)
        block = Block(end, end, self._memory.save_part(id_))
        return block, self.index.mark(id_, end, block)

    def _save_fork(self, id_: int, end: int) -> None:
        """Save the whole state of a prefix that several prompts share, so that it remains when its cells are freed."""
        if self._memory.kind is MemoryKind.RECURRENT or self._memory.state_size(id_) > self.ram.max_bytes * FORK_SHARE:
            return
        self._save(id_, 0, end)

    def _spared(self, block: Block) -> bool:
        return self._memory.kind is MemoryKind.RECURRENT or is_fork(block)

    def _unsaved(self, id_: int) -> Iterable[tuple[int, int]]:
        if not self.ram.max_bytes:
            return ()
        end = self.index.held_by(id_)
        leaf = next(self.index.nodes_of(id_), None)
        saved = leaf is None or any(block.start == 0 and block.end == end for block in leaf.blocks)
        return () if saved else ((0, end),)

    def _save_until(self, id_: int, until: float) -> bool:
        """Save the whole state in one go, if RAM can hold it: it can't be saved in parts. Always return True."""
        for start, end in self._unsaved(id_):
            if self._memory.state_size(id_) <= self.ram.max_bytes:
                self._save(id_, start, end)
        return True

    def _take(self, id_: int, start: int, end: int) -> bytes:
        return self._memory.save(id_)
