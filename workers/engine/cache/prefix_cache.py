"""The prefix cache: which sequence holds which KV cells, which prefixes stay, and which move to RAM and back.

A call takes the longest prefix that is known. Cells that some sequence holds are shared without a copy; blocks in RAM
are restored one by one. When the call ends, its cells stay under its sequence id, idle, for the next call to share.
Attention scans idle cells too, in every step, so they move to RAM after a while, a few blocks per step. This is for
memory that can be shared by ranges of tokens (`MemoryKind.by_range`); other kinds: `window_cells` and `checkpoints`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from workers.engine.cache.cached_sequence import NOWHERE, CachedSequence, Match, Restore
from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import BLOCK_TOKENS, Path
from workers.engine.cache.ram import RamStore
from workers.engine.pace import MOVE_S, MovePace
from workers.engine.request import IntegrityError
from workers.llama.memory import CellPositions, Memory, num_cells_of
from workers.llama.native import StateUnusable

IDLE_STEPS = 32
"""Number of steps, computed for other calls, after which an idle prefix leaves the KV cache.

Keeping it costs attention's scan (0.3 us per token and step with flash attention, 2.6 us without). Moving it to RAM
costs saving and restoring (a few us per token). After this many steps keeping it has cost more."""

CHEAP_CELLS = 256
"""Number of idle cells that cost almost nothing: llama.cpp rounds the cells that it scans up to a multiple of this."""

IDLE_STEPS_WITHOUT_RAM = 8192
"""Without a RAM tier, an idle prefix leaves the KV cache after this many steps, and must be computed anew then."""

PACK_CELLS = 512
"""Packing begins if the free cells below the highest used cell outnumber both this and the cells in use."""

PACK_TOKENS = 1024
"""Most tokens that packing moves at once: about 2 ms with a 0.5 B model."""

PACK_BYTES = 16 << 20
"""Most bytes that packing moves at once: 1,024 tokens of an 8 B model are 128 MiB, and took 46 ms."""

TELL_S = 10.0
"""Minimum seconds between two log lines about prefixes that could not be saved for want of memory."""

UNSAVED = (MemoryError, StateUnusable)
"""Errors raised by saving if there is no memory for the copy, here or within llama.cpp; the cells stay as they were."""

_END = object()

log = logging.getLogger("paddock.engine")


@dataclass(slots=True)
class Idle:
    """A cached prefix that no running call uses."""

    since_step: int
    last_used: float
    """Time of the last use, `time.monotonic` seconds."""


class PrefixCache:
    """The prefixes in the KV cache and in RAM. Belongs to the engine's thread."""

    can_pack = True
    """Whether cells can be moved within the cache."""
    needs_stops = False
    """Whether a prefix can be shared only at lengths where a checkpoint was saved, such as by `reached`."""

    def __init__(
        self,
        memory: Memory,
        *,
        kv_tokens: int,
        num_sequences: int,
        ram_bytes: int,
        pace: MovePace,
        on_evict: Callable[[Block], None] = lambda block: None,
        on_unusable: Callable[[Block], None] = lambda block: None,
    ) -> None:
        """`num_sequences`: at least one more than the engine has slots; the last one is used to move cells. `on_evict`
        and `on_unusable` are called with blocks that leave RAM: for room, or since llama.cpp can't restore them."""
        self.kv_tokens = kv_tokens
        self.index = PrefixIndex()
        self.ram = RamStore(self.index, ram_bytes, on_evict)
        self._on_unusable = on_unusable
        self.num_restored = 0
        """Tokens brought back from RAM so far."""
        self.num_packed = 0
        """Tokens moved within the cache so far, to close holes."""
        self._memory = memory
        self._pace = pace
        self._num_sequences = num_sequences
        self._scratch = num_sequences - 1
        self._ids = range(num_sequences if self.needs_stops else self._scratch)
        self._free_ids = list(reversed(self._ids))
        self._live: dict[int, CachedSequence] = {}
        self._idle: dict[int, Idle] = {}
        self._token_bytes = 0.0
        """Most bytes that a saved token has taken so far."""
        self._step = 0
        self._most_used = 0
        """Most cells in use at once since the last packing: about the number of the highest cell in use."""
        self._packing: Iterator[None] | None = None
        self._told_at = -TELL_S

    @property
    def num_used(self) -> int:
        """Return how many cells hold a token, or stay free so that full conversations can shift their context."""
        index = self.index
        own = sum(one.num_cells - index.held_by(id_) for id_, one in self._live.items())
        return index.num_cells + own + self._num_to_part()

    @property
    def num_free(self) -> int:
        return self.kv_tokens - self.num_used

    @property
    def num_idle(self) -> int:
        """Return how many cells `make_room` can free."""
        return self.num_idle_without(())

    @property
    def keeps_parts(self) -> bool:
        """Return whether a partly computed prompt can leave the KV cache and come back without being computed again."""
        return not self.needs_stops and self.ram.max_bytes > 0

    def num_idle_without(self, leaving: Iterable[CachedSequence]) -> int:
        """Return how many cells `make_room` could free if the sequences `leaving` left the cache."""
        left = {one.id: one for one in leaving if one.id != NOWHERE}
        live: set[int] = self._live.keys() - left.keys()
        nodes = {id(node): node for id_ in (*self._idle, *left) for node in self.index.nodes_of(id_)}
        tails = sum(one.num_cells - self.index.held_by(id_) for id_, one in left.items())
        return tails + sum(len(node.tokens) for node in nodes.values() if not node.holders & live)

    def lookup(self, sequence: CachedSequence) -> Match:
        """Return the longest known prefix of the sequence's tokens, but for the last, which is computed to get its
        logits; search the newest tokens of running calls too."""
        self._enter_live(sequence)
        match = sequence.trim(self.index.match(sequence.path(), sequence.num_known - 1))
        return match if self._pace.restore_pays else Match(match.num_held, match.holder, ())

    def enter(self, sequence: CachedSequence) -> None:
        """Give the sequence an id and share the cached cells of its prefix with it. Put the saved blocks that continue
        this prefix into its `restores`."""
        match = self.lookup(sequence)
        sequence.id = self._new_id(match.holder)
        sequence.num_cells = 0
        self._live[sequence.id] = sequence
        self._memory.lay_out(sequence.id, sequence.positions)
        if match.num_held:
            self._memory.share(match.holder, sequence.id, 0, match.num_held)
            self.index.share(sequence.id, sequence.path(), match.num_held)
            sequence.num_cells = match.num_held
        sequence.restores.extend(match.restores)
        self._drop_covered(sequence.id)
        self._thin_out()
        self._most_used = max(self._most_used, self.num_used)

    def restore(self, sequence: CachedSequence) -> None:
        """Restore the next block that the sequence waits for. If that fails, the remaining tokens are computed.

        A block with the beginning of a picture at one position fills the cells of all of it, so that those after it
        come at once: other calls count on the cells, and of a part no rest can be computed."""
        self._restore_next(sequence)
        while sequence.is_within_picture and sequence.restores:
            self._restore_next(sequence)
        if sequence.is_within_picture:
            self.truncate(sequence, sequence.num_whole)

    def _restore_next(self, sequence: CachedSequence) -> None:
        part = sequence.restores.popleft()
        block = part.block
        num_cells = num_cells_of(sequence.positions, block.start, block.end)
        if part.start != sequence.num_cells or not self.make_room(num_cells):
            sequence.restores.clear()
            return
        started = time.perf_counter()
        try:
            self._memory.load(self._scratch, block.state, sequence.positions)
        except StateUnusable:
            self._discard(block)
            sequence.restores.clear()
            return
        self._memory.share(self._scratch, sequence.id, part.start, part.end)
        self._memory.remove(self._scratch)
        sequence.num_cells = part.end
        self.index.extend(sequence.id, sequence.path(), sequence.num_whole)
        self.ram.touch(block)
        self.num_restored += part.end - part.start
        sequence.num_restored += part.end - part.start
        if num_cells:
            self._pace.note_restore(num_cells, time.perf_counter() - started)

    def _discard(self, block: Block) -> None:
        """Drop a saved block that llama.cpp could not restore."""
        self._on_unusable(block)
        self.ram.discard(block)

    def reached(self, sequence: CachedSequence) -> None:
        """Note that a prompt is computed up to one of its `stops` or its end. Not needed here: does nothing."""

    def leave(self, sequence: CachedSequence, *, keep: bool) -> None:
        """Take the sequence out of the cache. `keep`: its cells stay as an idle prefix, if possible."""
        self._most_used = max(self._most_used, self.num_used)
        keep = self.truncate(sequence, sequence.num_whole) and keep
        id_, sequence.id = sequence.id, NOWHERE
        del self._live[id_]
        sequence.restores.clear()
        if not (keep and sequence.can_be_kept and self._settle(id_, sequence)):
            self._free(id_)
            return
        self._idle[id_] = Idle(self._step, time.monotonic())
        self._touch(id_)
        self._drop_covered(id_)
        leaf = next(self.index.nodes_of(id_))
        if len(leaf.holders) > 1:
            self._free(id_)

    def shift(self, sequence: CachedSequence, start: int, end: int, until: float) -> bool:
        """Shift the context: drop tokens [start, end). Return False if there is no room: the call must end then.
        If the time `until` passes before, return True but leave the sequence `is_full`: the next step calls this again.

        A shift moves cells for all sequences that hold them, so this sequence gets copies of its shared cells first.
        They are copied from the last to the first, so that the cells still shared are always those at the beginning."""
        id_, num_cells = sequence.id, sequence.num_cells
        first_moved = 0 if start else end  # dropped cells need no copy if nothing before them stays
        has_room = not self._num_shared(id_) or self.make_room(0)  # `num_used` counts the cells to be copied
        num_shared = self._num_shared(id_)
        while has_room and num_shared > first_moved and time.perf_counter() < until:
            first = max(first_moved, (num_shared - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            has_room = self._part(id_, first, num_shared)
            num_shared = first if has_room else num_shared
        if not has_room or num_shared > first_moved:
            self.index.release(id_, num_shared)
            return has_room
        self.index.release(id_)
        if sequence.shifted:
            self.erase(sequence.path())
        self._memory.cut(id_, start, end)
        self._memory.shift(id_, end, num_cells, start - end)
        sequence.forget(start, end)
        return True

    def truncate(self, sequence: CachedSequence, num_cells: int, *, is_draft: bool = False) -> bool:
        """Drop a sequence's cells from `num_cells` on. Return False if this memory can't; the cells stay then.
        `is_draft`: whether the last step computed them all, for this sequence alone."""
        if sequence.id != NOWHERE and num_cells < sequence.num_cells:
            self.index.release(sequence.id, num_cells)
            self._memory.cut(sequence.id, num_cells, -1)
            sequence.num_cells = num_cells
        return True

    def make_room(self, num_cells: int) -> bool:
        """Free idle prefixes until `num_cells` cells are free; return whether that was possible."""
        until = time.perf_counter() + MOVE_S
        while self.num_free < num_cells:
            if not self._idle:
                return False
            self._evict(min(self._idle, key=self._worth), until)
        return True

    def tidy(self, step: int, seconds: float) -> None:
        """Move prefixes that were idle for long to RAM, and pack cells, for about `seconds`. Called in every step."""
        self._step = step
        if self._idle or self._packing:
            self._tidy_until(time.perf_counter() + seconds)

    def take_in(self, path: Path, block: Block) -> None:
        """Put a saved block of the conversation `path` into RAM. This process or another has saved it earlier."""
        if self.ram.max_bytes:
            self.ram.add(block, self.index.put(path, block, self._spared))

    def copies(self, path: Path, start: int, end: int) -> Iterator[Block]:
        """Yield copies of the path's cells [start, end), a bounded number in each block. Stop at the first cell that is
        neither cached nor saved, or when a saved block must be cut but no cells are free to load it into. Calls may
        begin and end between two copies. Raises StateUnusable."""
        num_releases, match, parts = -1, Match(0, NOWHERE, ()), iter(tuple[Restore, ...]())
        while start < end:
            if self.index.num_releases != num_releases:
                num_releases, match = self.index.num_releases, self.index.match(path, end, start)
                parts = iter(match.restores)
            block: Block | None = None
            if start >= match.num_held:
                if (part := next(parts, None)) is not None:
                    block = self.cut_out(part.block, start, part.end, path.positions)
            elif self._memory.holds_from(match.holder, start):
                stop = min(match.num_held, start - start % BLOCK_TOKENS + BLOCK_TOKENS)
                block = Block(start, stop, self._take(match.holder, start, stop))
            if block is None:
                return
            yield block
            start = block.end

    def state_size(self, path: Path, end: int) -> int:
        """Return the bytes of the whole state that `copies` must save; 0: `copies` yields ranges or a saved state."""
        return 0

    def erase(self, path: Path) -> None:
        """Free the cells and saved blocks that only this conversation has; cells that others use or share stay."""
        own = [id_ for id_ in self._idle if self.index.held_in(id_, path) == self.index.held_by(id_) > path.num_public]
        for id_ in own:
            self._free(id_)
        for block in self.index.own_blocks(path):
            self.ram.discard(block)

    def save_some(self) -> bool:
        """Copy a part of an idle prefix to RAM before its cells are needed; return False if nothing was copied."""
        for id_ in self._idle:
            for start, end in self._unsaved(id_):
                # Only into free room: blocks dropped for it would leave other idle prefixes unsaved.
                if self.ram.num_free < (end - start) * self._token_bytes:
                    return False
                if self._save(id_, start, end) is not None:
                    return True
                break
        return False

    def save_idle(self, go_on: Callable[[Block], bool]) -> None:
        """Copy idle prefixes to RAM, the latest used first, until `go_on(block)` is false. They stay cached, too."""
        for id_ in sorted(self._idle, key=lambda id_: -self._idle[id_].last_used):
            for start, end in self._unsaved(id_):
                block = self._save(id_, start, end)
                if block is None:
                    break
                if not go_on(block):
                    return

    def forget_all(self) -> None:
        """Free every prefix, in RAM too, and overwrite every cell. Call it only while no call runs."""
        for id_ in list(self._idle):
            self._free(id_)
        for block in self.ram.blocks:
            self.ram.discard(block)
        self._memory.clear()

    def check(self) -> None:
        """Raise IntegrityError if the cache's records contradict each other, or what llama.cpp's KV cache holds."""
        try:
            self.index.check()
            self.ram.check()
        except ValueError as error:
            raise IntegrityError(str(error)) from error
        self.check_cells()

    def check_cells(self) -> None:
        """Check only how many cells each sequence has, the quick part of `check`. Raises IntegrityError."""
        self._check_ids()
        held = {id_: one.num_cells for id_, one in self._live.items()}
        held |= {id_: self.index.held_by(id_) for id_ in self._idle}
        for id_ in range(self._num_sequences):
            self._check_sequence(id_, held.get(id_, 0))

    def _check_ids(self) -> None:
        if sorted([*self._free_ids, *self._live, *self._idle]) != list(self._ids):
            raise IntegrityError(
                f"ids are lost or held twice: {self._free_ids}, {list(self._live)}, {list(self._idle)}"
            )

    def _check_sequence(self, id_: int, num_cells: int) -> None:
        if not self._memory.can_continue(id_, num_cells):
            first, last = self._memory.first_position(id_), self._memory.last_position(id_)
            raise IntegrityError(
                f"sequence {id_}: {num_cells} cells by the book, positions {first} to {last} in the cache"
            )

    def _tidy_until(self, until: float) -> None:
        patience = IDLE_STEPS if self.ram.max_bytes else IDLE_STEPS_WITHOUT_RAM
        for id_ in [id_ for id_, idle in self._idle.items() if self._step - idle.since_step >= patience]:
            if time.perf_counter() >= until or not self._save_until(id_, until):
                return
            self._free(id_)
        while self._packing is not None and time.perf_counter() < until:
            if next(self._packing, _END) is _END:
                self._packing = None

    def _pack(self) -> Iterator[None]:
        """Move the cells of running calls down into free cells with lower numbers, a part at a time.

        Attention scans all cells up to the highest one in use, free ones too."""
        seen: set[int] = set()
        for id_ in list(self._live):
            sequence = self._live.get(id_)
            if sequence is None or sequence.shifted:  # moved keys are rotated by the next step: they can't be saved yet
                continue
            for node in list(self.index.nodes_of(id_)):
                if id(node) in seen or id_ not in node.holders:
                    continue
                seen.add(id(node))
                first = start = node.start
                while start < node.end:
                    if node.start != first or id_ not in node.holders:
                        break  # it was split or left since the last part
                    end = min(start + self._num_packed_at_once, node.end)
                    if not self._move_down(list(node.holders), start, end):
                        return
                    start = end
                    yield
            start, last = self.index.held_by(id_), sequence.num_cells
            while self._has_own(id_, sequence, start, last):
                end = min(start + self._num_packed_at_once, last)
                if not self._move_down([id_], start, end):
                    return
                start = end
                yield
        self._most_used = self.num_used

    def _has_own(self, id_: int, sequence: CachedSequence, start: int, end: int) -> bool:
        """Return whether the call still has this id and alone holds its cells [start, end): the index lacks them."""
        if self._live.get(id_) is not sequence or sequence.shifted:
            return False
        return self.index.held_by(id_) <= start < end <= sequence.num_cells

    def _move_down(self, holders: list[int], start: int, end: int) -> bool:
        """Move cells to lower numbers. Return False if memory is short: they then stay, and attention is slower."""
        try:
            num_bytes = self._memory.relocate(holders, self._scratch, start, end)
        except MemoryError:
            self._most_used = self.num_used
            return False
        num_cells = self._memory.num_cells(holders[0], start, end)
        if num_cells >= BLOCK_TOKENS:  # of fewer, what every state begins with is a large part
            self._token_bytes = max(self._token_bytes, num_bytes / num_cells)
        self.num_packed += end - start
        return True

    @property
    def _num_packed_at_once(self) -> int:
        """Return how many tokens packing moves at once: few until it is known how many bytes a token takes."""
        num_tokens = int(PACK_BYTES / self._token_bytes) if self._token_bytes else BLOCK_TOKENS
        return max(BLOCK_TOKENS, min(PACK_TOKENS, num_tokens))

    def _enter_live(self, asking: CachedSequence) -> None:
        """Enter the newest cells of running calls into the index, if the call `asking` could share them."""
        for id_, one in self._live.items():
            same = one.scope == asking.scope or (one.num_public and one.scope.adapters == asking.scope.adapters)
            if same and one.cache_prompt and not one.shifted and self.index.held_by(id_) < one.num_whole:
                self.index.extend(id_, one.path(), one.num_whole)

    def _new_id(self, needed: int) -> int:
        """Return a free sequence id; evicts an idle prefix if no id is free. `needed`: a sequence that must stay."""
        if not self._free_ids:
            idle = (id_ for id_ in self._idle if id_ != needed)
            self._evict(min(idle, key=self._worth), time.perf_counter() + MOVE_S)
        return self._free_ids.pop()

    def _thin_out(self) -> None:
        """Free idle prefixes that are saved in RAM, so that a call that begins gets cells with low numbers.

        Attention scans all cells up to the highest one in use, free ones too, for as long as the call runs."""
        num_idle = self.num_idle if self._idle else 0
        for id_ in list(self._idle):
            if num_idle <= CHEAP_CELLS:
                return
            if self.ram.max_bytes and not self._unsaved(id_):
                num_idle -= self.index.num_exclusive(id_)
                self._free(id_)

    def _settle(self, id_: int, sequence: CachedSequence) -> bool:
        """Enter into the index all cells of a sequence whose call has ended; return whether they can be kept.

        Where other sequences computed the same tokens, their cells replace those of this sequence."""
        path = sequence.path()
        while (known := self.index.extend(id_, path, sequence.num_cells)) < sequence.num_cells:
            other = self.index.match(path, sequence.num_cells)
            self._memory.cut(id_, known, other.num_held)
            self._memory.share(other.holder, id_, known, other.num_held)
            self.index.share(id_, path, other.num_held)
        return True

    def _num_shared(self, id_: int) -> int:
        """Return how many cells, from the sequence's beginning on, other sequences hold too."""
        return self.index.held_by(id_) - self.index.num_exclusive(id_)

    def _num_to_part(self) -> int:
        """Return how many cells to copy so that full conversations share none; one holder can keep the original."""
        full = {id_ for id_, one in self._live.items() if one.is_full}
        nodes = {id(node): node for id_ in full for node in self.index.nodes_of(id_)}
        return sum(len(node.tokens) * min(len(node.holders & full), len(node.holders) - 1) for node in nodes.values())

    def _part(self, id_: int, start: int, end: int) -> bool:
        """Copy a range of shared cells to cells of the sequence's own; return whether there was memory for that."""
        try:
            self._memory.load(self._scratch, self._take(id_, start, end))
        except UNSAVED:
            return False
        self._memory.cut(id_, start, end)
        self._memory.share(self._scratch, id_, start, end)
        self._memory.remove(self._scratch)
        return True

    def _touch(self, id_: int) -> None:
        """Mark the saved blocks of a prefix as just used; else saving the prefix's end could evict them from RAM."""
        self.ram.touch(*self._blocks_of(id_))

    def _blocks_of(self, id_: int) -> set[Block]:
        """Return the saved blocks that lie wholly within a prefix; leave out those that extend into another prefix."""
        nodes = set(self.index.nodes_of(id_))
        return {block for node in nodes for block in node.blocks if block.nodes <= nodes}

    def _drop_covered(self, by: int) -> None:
        """Free the id of each idle prefix whose cells the sequence `by` holds as well: the id is not needed then."""
        for id_ in [id_ for id_ in self._idle if id_ != by and self.index.ends_above(id_, by)]:
            self._free(id_)

    def _worth(self, id_: int) -> float:
        """Return the worth of an idle prefix: the seconds to rebuild it, divided by the time since its last use."""
        age_s = time.monotonic() - self._idle[id_].last_used + 1e-3
        return self._pace.rebuild_s(self.index.num_exclusive(id_), saved=not self._unsaved(id_)) / age_s

    def _evict(self, id_: int, until: float) -> None:
        """Free a prefix at once. Of a long prefix only the beginning is saved, since running streams wait meanwhile."""
        self._save_until(id_, until)
        self._free(id_)

    def _save_until(self, id_: int, until: float) -> bool:
        """Copy the unsaved parts of a prefix to RAM until about `until`; return whether there was time for all of them.

        Copies from the beginning on, at least one range, but no more than RAM can hold: later blocks would evict the
        earlier blocks."""
        unsaved = self._unsaved(id_)
        if not unsaved:
            return True
        saved = self._blocks_of(id_)
        self.ram.touch(*saved)
        sizes = [len(block.state) for block in saved]
        room, size = self.ram.low_water - sum(sizes), max(sizes, default=0)
        for start, end in unsaved:
            block = self._save(id_, start, end) if room >= size else None
            if block is None:
                break
            size = len(block.state)
            room -= size
            if time.perf_counter() >= until:
                break
        self._touch(id_)
        return time.perf_counter() < until

    def _unsaved(self, id_: int) -> Iterable[tuple[int, int]]:
        return self.index.unsaved(id_, BLOCK_TOKENS) if self.ram.max_bytes else ()

    def _save(self, id_: int, start: int, end: int) -> Block | None:
        """Copy a range to RAM and return its block; None: it could not be kept, and is computed anew if needed."""
        try:
            block = Block(start, end, self._take(id_, start, end))
        except UNSAVED as error:
            self._note_unsaved(end - start, error)
            return None
        if num_cells := self._memory.num_cells(id_, start, end):
            self._token_bytes = max(self._token_bytes, len(block.state) / num_cells)
        self.ram.add(block, self.index.store(id_, block, self._spared))
        if id_ in self._idle:  # it was last used when its prefix was, and is no newer than the blocks before it
            block.touched = self._idle[id_].last_used
        return block if block.nodes else None

    def _note_unsaved(self, num_tokens: int, error: Exception) -> None:
        if (now := time.monotonic()) - self._told_at >= TELL_S:
            self._told_at = now
            told = "no memory to keep a prefix in (%d tokens): it is computed again where wanted (%s)"
            log.warning(told, num_tokens, str(error) or "out of memory")

    def _spared(self, block: Block) -> bool:
        """Return whether to keep a shorter saved block beside a longer one that covers it: here never."""
        return False

    def _take(self, id_: int, start: int, end: int) -> bytes:
        """Return the saved state of a range of cells."""
        self._memory.share(id_, self._scratch, start, end)
        try:
            return self._memory.save(self._scratch)
        finally:
            self._memory.remove(self._scratch)

    def cut_out(self, block: Block, start: int, end: int, positions: CellPositions | None = None) -> Block | None:
        """Return a part of a saved block; None: no cells are free to load the block into. Raises StateUnusable."""
        if (start, end) == (block.start, block.end):
            return Block(start, end, block.state)
        if not self.make_room(num_cells_of(positions, block.start, block.end)):
            return None
        self._memory.load(self._scratch, block.state, positions)
        try:
            self._memory.cut(self._scratch, block.start, start)
            self._memory.cut(self._scratch, end, block.end)
            return Block(start, end, self._memory.save(self._scratch))
        finally:
            self._memory.remove(self._scratch)

    def _free(self, id_: int) -> None:
        self._idle.pop(id_, None)
        self.index.release(id_)
        self._memory.remove(id_)
        self._free_ids.append(id_)
        num_used = self.num_used
        if self.can_pack and self._packing is None and self._most_used - num_used > max(PACK_CELLS, num_used):
            self._packing = self._pack()
