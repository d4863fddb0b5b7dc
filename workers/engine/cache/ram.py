"""Keeps saved KV in main memory: blocks of the prefix index, up to a maximum number of bytes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block, is_crowded

LOW_WATER = 0.9
"""Share of `max_bytes`. A full store drops blocks to make room, but no more once at most this much is left."""

MAX_DROP_BYTES = 64 << 20
"""Maximum bytes freed at once, since all calls wait while the system takes memory back. That takes 65 ms for a GiB, and
0.1 s for 1.6 GiB."""


class RamStore:
    """Holds the saved blocks. Belongs to the engine's thread. `on_evict` is called with each block dropped for room."""

    def __init__(
        self, index: PrefixIndex, max_bytes: int, on_evict: Callable[[Block], None] = lambda block: None
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._index = index
        self._on_evict = on_evict
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        """The blocks, in the order in which they are dropped."""

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> frozenset[Block]:
        return frozenset(self._blocks)

    def add(self, block: Block, needless: list[Block]) -> None:
        """Add a block that is in the index, and forget the older blocks in `needless`, which it replaces. If the new
        block is too large for the store, or crowded (`is_crowded`), remove it from the index instead."""
        for old in needless:
            self._forget(old)
        if len(block.state) > self.max_bytes or is_crowded(block):
            self._index.drop(block)
            return
        self._blocks[block] = None
        self.num_bytes += len(block.state)
        block.touched = time.monotonic()
        if self.num_bytes > self.max_bytes:
            self._shrink(max(self.low_water, self.max_bytes - MAX_DROP_BYTES))

    @property
    def num_free(self) -> int:
        """Return how many bytes fit without dropping a block."""
        return self.max_bytes - self.num_bytes

    def discard(self, block: Block) -> None:
        """Drop a block that is of no use, from the index too."""
        self._index.drop(block)
        self._forget(block)

    @property
    def low_water(self) -> int:
        """Return `LOW_WATER` in bytes. To make room, the store drops no more blocks once at most so many are left."""
        return int(self.max_bytes * LOW_WATER)

    def touch(self, *blocks: Block) -> None:
        """Mark blocks as used now. Of one prefix, the last blocks are dropped first: fewer prompts begin with them."""
        now = time.monotonic()
        for block in sorted(blocks, key=lambda block: -block.start):
            block.touched = now
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def check(self) -> None:
        """Raise ValueError if the counted bytes or the index do not agree with the blocks in the store."""
        if self.num_bytes != sum(len(block.state) for block in self._blocks) or self.num_bytes > self.max_bytes:
            raise ValueError(f"{self.num_bytes} bytes counted in RAM, at most {self.max_bytes}")
        if any(not block.nodes or any(block not in node.blocks for node in block.nodes) for block in self._blocks):
            raise ValueError("a block in RAM is unknown to the index")

    def _forget(self, block: Block) -> None:
        if block in self._blocks:
            del self._blocks[block]
            self.num_bytes -= len(block.state)

    def _shrink(self, target: int) -> None:
        """Drop the least recently used blocks until at most `target` bytes are left.

        A block's bytes and the time to compute it anew both grow with its tokens, so only its last use matters here."""
        while self._blocks and self.num_bytes > target:
            block = next(iter(self._blocks))
            self._on_evict(block)
            self.discard(block)
