"""The part of a call that the cache uses: the call's tokens and KV cells. Also finds the KV cells and saved blocks of
other calls that match these tokens, along the nodes of a walk through the radix tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from secrets import token_hex

import numpy as np

from workers.engine.cache.prefix_tree import Block, Node
from workers.engine.cache.prompt import Path, Prompt, Scope, Tokens

Steps = list[tuple[Node, int]]
"""The nodes along a path, each with the position up to which the node's tokens are the same as the path's."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Tokens [start, end), to be restored from a saved block that covers them."""

    block: Block
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a conversation's path, from its first token on, that is in the KV cache or saved."""

    num_held: int
    """Number of the path's first tokens that are in the KV cache."""
    holder: int
    """Id of a sequence that holds the cells of the first `num_held` tokens; -1: `num_held` is 0."""
    restores: tuple[Restore, ...]
    """Saved parts that follow the first `num_held` tokens without a gap."""

    @property
    def num_known(self) -> int:
        return self.restores[-1].end if self.restores else self.num_held


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A number of tokens after which a conversation can be continued from a saved state."""

    end: int
    """Number of the conversation's first tokens that need not be computed."""
    holder: int
    """Id of a sequence that holds the cells of the first `end` tokens; -1: `block` has their whole state."""
    block: Block | None
    """The saved state; None: there is no checkpoint, and `end` is 0."""


def checkpoints_along(steps: Steps) -> Iterator[Checkpoint]:
    """Yield the checkpoints along the steps of a walk. Some kinds of memory can continue only from a checkpoint."""
    for number, (node, end) in enumerate(steps):
        for block in node.blocks:
            whole = block.start < block.end
            reach = _reach(block, steps, number) if whole else end
            if block.end == reach and (whole or node.holders):
                yield Checkpoint(block.end, -1 if whole else next(iter(node.holders)), block)


def restores_along(steps: Steps, position: int) -> Iterator[Restore]:
    """Yield the saved parts to restore along the steps of a walk, from `position` up to the first gap. Each part comes
    from the block that reaches furthest."""
    for here, (node, end) in enumerate(steps):
        if end <= position:
            continue
        number = node.first_over(position)
        while position < end:
            best, best_end = None, position
            while number < len(node.blocks) and node.blocks[number].start <= position:
                block = node.blocks[number]
                if block.end > best_end and (reach := _reach(block, steps, here)) > best_end:
                    best, best_end = block, reach
                number += 1
            if best is None:
                return
            yield Restore(best, position, best_end)
            position = best_end


def _reach(block: Block, steps: Steps, here: int) -> int:
    """Return the position up to which the block's tokens are the same as the path's, along the steps from `here` on."""
    reach = 0
    for number in range(here, len(steps)):
        node, end = steps[number]
        if node not in block.nodes:
            break
        reach = min(block.end, end)
        if end < node.end:
            break
    return reach


NOWHERE = -1
"""Stands for the sequence id or slot of a call that has none."""


class CachedSequence:
    """The tokens of a call and its cells in the KV cache. Belongs to the engine's thread."""

    __slots__ = (
        *("_base", "_n_ctx", "_num_unturned", "_own", "_since", "cache_prompt", "fetched", "fetching", "id", "key"),
        *("num_cells", "num_fetched", "num_prompt", "num_public", "num_restored", "position_lag", "positions"),
        *("prompt", "restores", "scope", "shifted", "stops"),
    )

    def __init__(
        self, key: int, prompt: Prompt, scope: Scope, n_ctx: int, *, cache_prompt: bool = True, num_public: int = 0
    ) -> None:
        """`cache_prompt`: other calls may share the cells. `num_public`: number of first tokens any team may share."""
        self.key, self.prompt, self.scope = key, prompt, scope
        self.num_prompt, self.num_public, self.cache_prompt = len(prompt), num_public, cache_prompt
        self.id = NOWHERE
        """Sequence id in the KV cache; `NOWHERE` while the call waits."""
        self.num_cells = 0
        """Number of the conversation's first tokens that are in the KV cache."""
        self.positions = prompt.positions()
        """Positions of the cells; None: they are the cells' numbers."""
        self.position_lag = self.num_prompt - prompt.position(self.num_prompt)
        """How many more cells than positions the prompt has: the answer's token in cell n has position n minus this."""
        self.restores: deque[Restore] = deque()
        """Saved blocks to restore before anything is computed."""
        self.num_restored = self.num_fetched = 0
        """Tokens of the call so far: `num_restored`, restored from RAM; `num_fetched`, fetched from disk to RAM."""
        self.fetching = self.fetched = False
        """`fetching`: the call waits for blocks from disk. `fetched`: the disk was asked for the call's blocks."""
        self.stops: set[int] = set()
        """Lengths of the prompt at which the state is saved: a chunk of the prompt must end at each of them."""
        self.shifted = False
        """Whether the context was shifted. If so, no call may share the cells: they depend on dropped tokens."""
        self._own = "" if cache_prompt else token_hex(16)
        """Name that hides the cells from other calls: without `cache_prompt`, or after a context shift. Else empty."""
        self._num_unturned = 0
        """Number of cells that remained after the last context shift; the next step rotates their keys."""
        self._base: Tokens = prompt.ids()
        self._since: list[int] = []
        self._n_ctx = n_ctx

    @property
    def num_known(self) -> int:
        """Return how many tokens the conversation has so far, with those of the answer."""
        return len(self._base) + len(self._since)

    @property
    def is_full(self) -> bool:
        """Return whether the call has `n_ctx` cells: no more tokens can be computed until its context is shifted."""
        return self.num_cells >= self._n_ctx and self.id != NOWHERE

    @property
    def can_be_kept(self) -> bool:
        """Return whether the cells may be saved: after a context shift only once a step has rotated their keys."""
        return self.num_cells > self._num_unturned

    @property
    def is_alone(self) -> bool:
        """Return whether no other call may share the cells; if so, they are kept only as long as the call lives."""
        return bool(self._own)

    def tokens(self) -> Tokens:
        """Return the conversation's tokens so far. The array must not be written to."""
        if self._since:
            self._base = np.concatenate((self._base, np.asarray(self._since, dtype=np.int32)))
            self._since = []
        return self._base

    def path(self) -> Path:
        if self._own:
            return Path(self.tokens(), replace(self.scope, own=self._own), 0, self.positions)
        return Path(self.tokens(), self.scope, self.num_public, self.positions)

    @property
    def num_whole(self) -> int:
        """Return how many of the first tokens are in the KV cache, leaving out a span of which only a part is there."""
        return self.prompt.floor(self.num_cells) if self.prompt.spans else self.num_cells

    @property
    def is_within_picture(self) -> bool:
        """Return whether the cells end within a picture of which llama.cpp finds all cells or none."""
        return self.positions is not None and self.positions.whole(self.num_cells) != self.num_cells

    @property
    def span(self) -> int:
        """Return the number of the span that the next cell belongs to; -1: it is a token's."""
        cell = self.num_cells
        return next((number for number, one in enumerate(self.prompt.spans) if one.start <= cell < one.end), NOWHERE)

    def trim(self, match: Match) -> Match:
        """Return a match of the conversation without a span of which it has only a part."""
        if not self.prompt.spans:
            return match
        held, end = self.prompt.floor(match.num_held), self.prompt.floor(match.num_known)
        restores = [part for part in match.restores if part.start < end] if held == match.num_held else []
        if restores and restores[-1].end > end:
            restores[-1] = replace(restores[-1], end=end)
        return Match(held, match.holder if held else NOWHERE, tuple(restores))

    def take_chunk(self, num_tokens: int) -> Tokens:
        """Return the next tokens to compute. They count as cached from now on."""
        chunk = self.tokens()[self.num_cells : self.num_cells + num_tokens]
        self.num_cells += num_tokens
        return chunk

    def hide(self) -> None:
        """Have no other call share the cells from now on."""
        self._own = token_hex(16)

    def forget(self, start: int, end: int) -> None:
        """Drop tokens [start, end) from the conversation. No other call may share its cells from now on."""
        tokens = self.tokens()
        self._base = np.concatenate((tokens[:start], tokens[end:]))
        self.num_cells -= end - start
        self.shifted = True
        self.hide()
        self._num_unturned = self.num_cells

    def cut(self, num_tokens: int) -> None:
        """Drop the newest `num_tokens` tokens from the conversation, after their cells were dropped."""
        self._base = self.tokens()[: self.num_known - num_tokens]
