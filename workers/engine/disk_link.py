"""Between the store of prefixes and the disk tier: what leaves RAM goes to disk, what a call needs is fetched first.

Only whole blocks of `BLOCK_TOKENS` go to disk, where any worker finds them by name; the last few tokens of a prefix are
computed anew. A call whose next blocks lie on disk waits for them outside, while others pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from workers.engine.cache import PrefixCache
from workers.engine.disk import DiskTier
from workers.engine.disk_names import BLOCK_TOKENS, BlockName, block_names
from workers.engine.pace import MovePace
from workers.engine.prefix import Block, path_of
from workers.engine.sequence import Sequence

QUEUE_WAIT_S = 0.05
"""While writing everything out: how long to wait for the tier's queue to have room again."""

Post = Callable[[Callable[[], None]], None]


class DiskLink:
    """Belongs to the engine's thread, but for what the tier's thread posts."""

    def __init__(self, tier: DiskTier, pace: MovePace, post: Post) -> None:
        self.num_fetched = 0
        """Tokens that came back from disk."""
        self._tier = tier
        self._pace = pace
        self._post = post
        self._token_bytes = 0.0

    def evicted(self, block: Block) -> bool:
        """A block leaves RAM -> False where the tier had no room for it."""
        name = _name(block)
        if name is None:
            return True
        self._token_bytes = len(block.state) / (block.end - block.start)
        return self._tier.put(name, block.state)

    def may_enter(self, sequence: Sequence, cache: PrefixCache) -> bool:
        """Whether nothing on disk would help the call; if something does, it is fetched now."""
        if sequence.fetching:
            return False
        if sequence.fetched or not sequence.request.cache_prompt or sequence.shifted:
            return True
        sequence.fetched = True
        first = cache.lookup(sequence).num_known // BLOCK_TOKENS
        last = (sequence.num_known - 1) // BLOCK_TOKENS
        if last <= first or not self._pays():
            return True
        path = sequence.path()
        names = block_names(path.tokens, path.scope, path.num_public)[first:last]
        names = names[: self._tier.num_known(names)]
        if names and self._tier.fetch(names, partial(self._arrived, sequence, cache, names)):
            sequence.fetching = True
        return not sequence.fetching

    def write_out(self, blocks: list[Block], deadline_s: float) -> None:
        """Put everything on disk within the time, the latest used first."""
        until = time.monotonic() + deadline_s
        for block in sorted(blocks, key=lambda block: (-block.touched, block.start)):
            while not self.evicted(block) and time.monotonic() < until:
                self._tier.flush(min(QUEUE_WAIT_S, max(0.0, until - time.monotonic())))
        self._tier.flush(max(0.0, until - time.monotonic()))

    def _arrived(self, sequence: Sequence, cache: PrefixCache, names: list[BlockName], states: list[bytes]) -> None:
        """On the tier's thread."""
        self._post(partial(self._take_in, sequence, cache, names, states))

    def _take_in(self, sequence: Sequence, cache: PrefixCache, names: list[BlockName], states: list[bytes]) -> None:
        sequence.fetching = False
        path = sequence.path()
        for name, state in zip(names, states, strict=False):
            cache.take_in(path, Block(name.start, name.end, state))
            self.num_fetched += name.end - name.start
            sequence.num_fetched += name.end - name.start

    def _pays(self) -> bool:
        """Whether reading and restoring is quicker than computing, as far as is known."""
        rate = self._tier.stats.read_bytes_per_s
        return self._pace.fetch_pays(self._token_bytes / rate if rate else 0.0)


def _name(block: Block) -> BlockName | None:
    """None for a block that is not whole: nobody would find it."""
    if block.start % BLOCK_TOKENS or block.end - block.start != BLOCK_TOKENS:
        return None
    node = max(block.nodes, key=lambda node: node.end)
    path = path_of(node, block.end)
    return block_names(path.tokens, path.scope, path.num_public)[-1]
