"""Matches of a path: the cells and saved blocks that are known along a walk through the radix tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.engine.cache.prefix_tree import Block, Node

Steps = list[tuple[Node, int]]
"""The nodes along a path, each with the position up to which it agrees with the path."""


@dataclass(frozen=True, slots=True)
class Restore:
    """A part [start, end) to restore out of a block that covers it."""

    block: Block
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a path that is known."""

    num_held: int
    """Tokens at the beginning that are in the cache."""
    holder: int
    """A sequence that holds those; -1 where there are none."""
    restores: tuple[Restore, ...]
    """Saved parts that follow those tokens, without a gap."""

    @property
    def num_known(self) -> int:
        return self.restores[-1].end if self.restores else self.num_held


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The place where a path can continue."""

    end: int
    """Tokens at the beginning that need not be computed."""
    holder: int
    """A sequence that holds the cells of those tokens; -1: `block` has all of them."""
    block: Block | None


def checkpoints_along(steps: Steps) -> Iterator[Checkpoint]:
    """Yield the places along the steps where memory can continue that only checkpoints can be continued from."""
    for number, (node, end) in enumerate(steps):
        for block in node.blocks:
            whole = block.start < block.end
            reach = _reach(block, steps, number) if whole else end
            if block.end == reach and (whole or node.holders):
                yield Checkpoint(block.end, -1 if whole else next(iter(node.holders)), block)


def restores_along(steps: Steps, position: int) -> Iterator[Restore]:
    """Yield the fewest blocks that follow `position` along the steps of a walk, up to the first gap."""
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
    """Return the position up to which the block's tokens agree with the path's, along the steps."""
    reach = 0
    for number in range(here, len(steps)):
        node, end = steps[number]
        if node not in block.nodes:
            break
        reach = min(block.end, end)
        if end < node.end:
            break
    return reach
