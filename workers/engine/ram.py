"""Saved KV in main memory: blocks of the prefix index, up to a number of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.engine.prefix import Block, PrefixIndex

LOW_WATER = 0.9
"""Over its bound the store goes down to this share of it at once, so that finding out what to drop is rarely done."""


class RamStore:
    """Belongs to the engine's thread. `on_evict` sees each block before it goes."""

    def __init__(
        self, index: PrefixIndex, max_bytes: int, on_evict: Callable[[Block], None] = lambda block: None
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._index = index
        self._on_evict = on_evict
        self._blocks: set[Block] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> frozenset[Block]:
        return frozenset(self._blocks)

    def add(self, block: Block, needless: list[Block]) -> None:
        """A block that the index knows by now; `needless` are those that it replaced. One that can't be kept is dropped
        from the index.
        """
        for old in needless:
            self._forget(old)
        if len(block.state) > self.max_bytes or self._index.is_crowded(block):
            self._index.drop(block)
            return
        self._blocks.add(block)
        self.num_bytes += len(block.state)
        block.touched = time.monotonic()
        if self.num_bytes > self.max_bytes:
            self._shrink(self.low_water)

    @property
    def num_free(self) -> int:
        """Bytes that fit without dropping anything."""
        return self.max_bytes - self.num_bytes

    def discard(self, block: Block) -> None:
        """The block is of no use."""
        self._index.drop(block)
        self._forget(block)

    @property
    def low_water(self) -> int:
        """What stays for sure of the blocks that were used last, in bytes."""
        return int(self.max_bytes * LOW_WATER)

    def touch(self, *blocks: Block) -> None:
        """They are of one age from now on."""
        now = time.monotonic()
        for block in blocks:
            block.touched = now

    def check(self) -> None:
        """Raises ValueError."""
        if self.num_bytes != sum(len(block.state) for block in self._blocks) or self.num_bytes > self.max_bytes:
            raise ValueError(f"{self.num_bytes} bytes counted in RAM, at most {self.max_bytes}")
        if any(not block.nodes or any(block not in node.blocks for node in block.nodes) for block in self._blocks):
            raise ValueError("a block in RAM is unknown to the index")

    def _forget(self, block: Block) -> None:
        if block in self._blocks:
            self._blocks.discard(block)
            self.num_bytes -= len(block.state)

    def _shrink(self, target: int) -> None:
        """Least recently used first; of one age the ends of prefixes, since a beginning serves more prompts.

        Bytes and the cost to compute them anew grow alike with a block's tokens, so recency alone decides here.
        """
        for block in sorted(self._blocks, key=lambda block: (block.touched, -block.start)):
            if self.num_bytes <= target:
                break
            self._on_evict(block)
            self.discard(block)
