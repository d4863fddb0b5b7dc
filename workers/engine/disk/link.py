"""Links the prefix cache with the disk tier: writes blocks that leave RAM to disk, and fetches blocks that calls need.

Only whole blocks of `BLOCK_TOKENS` go to disk, where any worker finds them by name; the last few tokens of a prefix are
computed anew. Memory that can't be cut into blocks goes to disk as whole states. A call can use a state if it continues
where the state ends. A call whose next tokens lie on disk waits for them without a slot, while others overtake it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from workers.engine.cache.cached_sequence import CachedSequence
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prefix_tree import Block, digest_at
from workers.engine.cache.prompt import BLOCK_TOKENS, BlockName, Path, StateNames, block_name, block_names, state_name
from workers.engine.disk.tier import DiskTier
from workers.engine.pace import MovePace

FETCH_BYTES = 64 << 20
"""Maximum bytes read at once for a call (at least one block); between two reads, blocks of other calls can be read."""

MAX_TAKEN_IN = 128
"""Maximum blocks put into RAM between two steps, which takes about 3 ms in a conversation of 128k tokens."""

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
OnBlocks = Callable[[list[Block]], None]


class DiskLink:
    """Moves blocks between RAM and disk tier. Belongs to the engine's thread; the tier's thread only posts to it."""

    def __init__(self, tier: DiskTier, pace: MovePace, by_range: bool, post: Post) -> None:
        """`by_range`: whether blocks of tokens are saved; if not, whole states."""
        self.num_fetched = 0
        """Number of tokens fetched from disk so far."""
        self._tier = tier
        self._pace = pace
        self._by_range = by_range
        self._post = post

    def evicted(self, block: Block) -> None:
        """Queue a block for writing to disk, as it leaves RAM. If the queue is full, drop, count and log it."""
        name = self._name(block)
        if name is not None:
            self._tier.put(name, block.state)

    def unusable(self, block: Block) -> None:
        """Have the file of a block that llama.cpp could not restore removed: it would be fetched for each call."""
        name = self._name(block)
        if name is not None and self._tier.has(name):
            self._tier.discard(name)

    def may_enter(self, sequence: CachedSequence, cache: PrefixCache) -> bool:
        """Return whether the call may get a slot now. If not, blocks are being fetched from disk for it."""
        if sequence.fetching:
            return False
        if sequence.fetched or not sequence.cache_prompt or sequence.shifted:
            return True
        sequence.fetched = True
        known = cache.lookup(sequence).num_known
        names = self._missing(sequence.path(), known, sequence.num_known - 1)
        if names:
            names = names[: self._tier.num_fitting(names, self._room(sequence, cache))]
        if names and self._pays(names, known):
            self._fetch_on(sequence, cache, names)
        return not sequence.fetching

    def look_up(self, path: Path, known: int, limit: int, on_blocks: OnBlocks) -> bool:
        """Start to fetch what the disk has of a conversation's tokens [known, limit); return whether it has started.

        If it has, `on_blocks` is called with the blocks later, once, on the engine's thread."""
        names = self._missing(path, known, limit)
        return bool(names) and self._fetch(names, on_blocks)

    def num_known(self, path: Path, known: int, limit: int) -> int:
        """Return how many of a path's first `limit` tokens are cached or on disk. `known`: how many are cached."""
        names = self._missing(path, known, limit)
        return names[-1].end if names else known

    def offer(self, block: Block) -> bool:
        """Queue a block to be written, without waiting; return False if the queue has no room now."""
        name = self._name(block)
        if name is None or self._tier.has(name):
            return True
        return self._tier.wait_room(len(block.state), 0.0) and self._tier.put(name, block.state)

    def tell(self) -> None:
        """Have other workers look for new files, from now on, each time the queue is written out: this worker ends."""
        self._tier.tell()

    def write(self, block: Block, until: float) -> bool:
        """Queue a block, waiting for room until `until` (`time.monotonic` seconds); return False if time ran out."""
        left_s = until - time.monotonic()
        name = self._name(block)
        if name is None or self._tier.has(name):
            return left_s > 0
        if left_s <= 0 or not self._tier.wait_room(len(block.state), left_s):
            return False
        self._tier.put(name, block.state)
        return True

    def write_out(self, blocks: list[Block], until: float) -> None:
        """Write all blocks to disk by the time `until`, those used last first; log a warning if time runs out."""
        latest = sorted(blocks, key=lambda block: (-block.touched, block.start))
        queued = all(self.write(block, until) for block in latest)
        written = self._tier.flush(max(0.0, until - time.monotonic()))
        if not (queued and written) and not self._tier.closed:
            log.warning("the time to stop was too short to write all cached prompts to disk")

    def _fetch(self, names: list[BlockName], on_blocks: OnBlocks) -> bool:
        return self._tier.fetch(names, partial(self._arrived, names, on_blocks))

    def _arrived(self, names: list[BlockName], on_blocks: OnBlocks, states: list[bytes]) -> None:
        """Post fetched blocks to the engine's thread. The tier's thread calls this."""
        blocks = [Block(name.start, name.end, state) for name, state in zip(names, states, strict=False)]
        self._post(partial(on_blocks, blocks))

    def _room(self, sequence: CachedSequence, cache: PrefixCache) -> int:
        """Return how many more bytes of the call's prefix fit in RAM. With more, the prefix's beginning would be
        evicted, and the rest be useless. Marks the prefix's blocks in RAM as used now."""
        if not self._by_range:
            return cache.ram.max_bytes
        known = [part.block for part in cache.lookup(sequence).restores]
        cache.ram.touch(*known)
        return cache.ram.low_water - sum(len(block.state) for block in known)

    def _fetch_on(self, sequence: CachedSequence, cache: PrefixCache, names: list[BlockName]) -> None:
        """Fetch the first of the named blocks (at least one) now, and the others once the first are in RAM."""
        num_now = max(1, self._tier.num_fitting(names, FETCH_BYTES))
        now, rest = names[:num_now], names[num_now:]
        sequence.fetching = self._fetch(now, partial(self._take_in, sequence, cache, num_now, rest))

    def _take_in(
        self, sequence: CachedSequence, cache: PrefixCache, num_asked: int, rest: list[BlockName], blocks: list[Block]
    ) -> None:
        """Put up to MAX_TAKEN_IN blocks into RAM, more after the next step; then fetch `rest`, if no block was missing.

        Blocks go in from last to first: one index node serves for all, and if RAM fills up, the first are dropped last.
        """
        path = sequence.path()
        for _ in range(min(len(blocks), MAX_TAKEN_IN)):
            block = blocks.pop()
            cache.take_in(path, block)
            self.num_fetched += block.end - block.start
            sequence.num_fetched += block.end - block.start
            num_asked -= 1
        if blocks:
            self._post(partial(self._take_in, sequence, cache, num_asked, rest, blocks))
        elif rest and not num_asked and sequence.fetching:
            self._fetch_on(sequence, cache, rest)
        else:
            sequence.fetching = False

    def _pays(self, names: list[BlockName], known: int) -> bool:
        """Return whether reading and restoring the blocks is likely quicker than computing the tokens after `known`."""
        num_spared = names[-1].end - known
        num_moved = names[-1].end - names[0].start
        more_s = self._tier.read_s(names) + (num_moved - num_spared) * self._pace.restore_s
        return self._pace.fetch_pays(more_s / num_spared)

    def _missing(self, path: Path, known: int, limit: int) -> list[BlockName]:
        if not self._by_range:
            return self._longest_state(path, known, limit)
        first, last = known // BLOCK_TOKENS, limit // BLOCK_TOKENS
        if last <= first:
            return []
        names = block_names(path.tokens, path.scope, path.num_public)[first:last]
        return names[: self._tier.num_known(names)]

    def _longest_state(self, path: Path, known: int, limit: int) -> list[BlockName]:
        """Return a list with the name of the longest state on disk that fits the path; empty: there is none."""
        names = StateNames(path.tokens[:limit], path.scope, path.num_public)
        end = limit
        while end > known:
            # The lengths from `last` + 1 to `end` have one stem: they are in one block, and all public or none.
            last = max(known, end // BLOCK_TOKENS * BLOCK_TOKENS - 1)
            if last < path.num_public < end:
                last = path.num_public
            if self._tier.has_states(*names.stem(end)):
                for one in map(names.name, range(end, last, -1)):
                    if self._tier.has(one):
                        return [one]
            end = last
        return []

    def _name(self, block: Block) -> BlockName | None:
        """Return a block's name on disk; None: the block is not written. That is so if only one call may use it, or it
        is not full, is a checkpoint (useless without cells in the KV cache), or is no longer in the index."""
        if not block.nodes or (self._by_range and not _is_whole(block)) or block.start == block.end:
            return None
        node, end = max(block.nodes, key=lambda node: node.end), block.end
        scope = node.scope
        if scope is None or scope.own:
            return None
        digest = digest_at(node, end)
        if self._by_range:
            return block_name(scope, node.num_public, end, digest)
        tail = node.leading(end // BLOCK_TOKENS * BLOCK_TOKENS, end)
        return state_name(scope, node.num_public, end, digest, tail)


LOOK_INTERVAL_S = 0.1
"""Seconds between two searches for prefixes that have become idle since the last search."""


class DrainWriter:
    """Writes idle prefixes to the disk tier while the last calls of a worker that is about to end still run.

    So another worker that continues one of these conversations finds it on disk. `Stepper.write_out` writes the other
    prefixes at the end. Belongs to the engine's thread."""

    def __init__(self, cache: PrefixCache, disk: DiskLink) -> None:
        self._cache = cache
        self._disk = disk
        self._due: deque[Block] = deque()
        self._offered: set[Block] = set()
        """Blocks in RAM that the disk tier has accepted."""
        self._look_at = 0.0
        disk.tell()

    def go_on(self, seconds: float) -> None:
        """Copy idle prefixes to RAM, and offer blocks in RAM to the disk tier, for about `seconds`."""
        now = time.monotonic()
        until = now + seconds
        if now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_S
            self._look(until)
        while self._due and time.monotonic() < until:
            if not self._disk.offer(self._due[0]):
                return
            self._offered.add(self._due.popleft())

    def _look(self, until: float) -> None:
        """Copy idle prefixes to RAM until the time `until`; then list the blocks still to offer, last used first."""
        self._cache.save_idle(lambda block: time.monotonic() < until)
        in_ram = self._cache.ram.blocks
        self._offered &= in_ram
        self._due = deque(sorted(in_ram - self._offered, key=lambda block: (-block.touched, block.start)))


def _is_whole(block: Block) -> bool:
    return not block.start % BLOCK_TOKENS and block.end - block.start == BLOCK_TOKENS
