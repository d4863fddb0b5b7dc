"""The radix index: every prefix whose KV is in the cache or saved in RAM, by the tokens that it was computed from.

A sequence that holds a node of the tree (`prefix_tree`) holds all nodes above it too, so all nodes above a cached node
are cached. The index does not use llama.cpp: sequence ids are plain numbers here, and the caller moves the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from workers.engine.cache.cached_sequence import Checkpoint, Match, checkpoints_along, restores_along
from workers.engine.cache.prefix_tree import (
    NO_TOKENS,
    Block,
    Node,
    branch,
    child_along,
    join,
    num_forks_below,
    onwards,
    prune,
    split,
    start_of,
    walk,
)
from workers.engine.cache.prompt import Path

Spared = Callable[[Block], bool]
"""Function that says whether a block stays though a longer one covers it: a state may be usable only at its own end."""


def nothing(block: Block) -> bool:
    """Return False (a `Spared`): keep no block that a longer one covers, as ranges can be cut out of the longer."""
    return False


class PrefixIndex:
    """The radix index. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.root = Node(NO_TOKENS, 0, None, None)
        self.num_cells = 0
        """Number of cells that sequences in the index hold; shared cells count once."""
        self.num_losses = 0
        """Number of removals so far that may have cost a token its last cell or saved copy."""
        self.num_releases = 0
        """Number of calls of `release` so far. If it has changed, an id that `match` returned before may be reused."""
        self._leaf: dict[int, Node] = {}

    def match(self, path: Path, limit: int, start: int = 0) -> Match:
        """Return how many of the first `limit` tokens are in cells, and the saved blocks after them, from `start`."""
        steps = list(walk(self.root, path, limit))
        num_held, holder = 0, -1
        for node, end in steps:
            if not node.holders:
                break
            num_held, holder = end, next(iter(node.holders))
        return Match(num_held, holder, tuple(restores_along(steps, max(num_held, start))))

    def match_checkpoint(self, path: Path, limit: int) -> Checkpoint:
        """Return the path's longest known prefix that ends at a checkpoint, for memory that can continue only there.

        Of two prefixes of one length, return the one whose cells are in the KV cache: it takes no further cells."""
        best = Checkpoint(0, -1, None)
        for found in checkpoints_along(list(walk(self.root, path, limit))):
            if (found.end, found.holder != -1) > (best.end, best.holder != -1):
                best = found
        return best

    def stops(self, path: Path, limit: int) -> tuple[int, ...]:
        """Return the lengths at which the path can be continued from a checkpoint, in ascending order."""
        return tuple(sorted({found.end for found in checkpoints_along(list(walk(self.root, path, limit)))}))

    def num_common(self, path: Path, limit: int) -> int:
        """Return how many of the path's tokens, from its beginning, are in the index, even if their KV is not kept."""
        return max((end for _, end in walk(self.root, path, limit)), default=0)

    def held_by(self, sequence: int) -> int:
        """Return how many of the sequence's tokens are in the index."""
        leaf = self._leaf.get(sequence)
        return leaf.end if leaf is not None else 0

    def held_in(self, sequence: int, path: Path) -> int:
        """Return how many of the path's tokens, from its beginning, the sequence holds."""
        return max(
            (end for node, end in walk(self.root, path, len(path.tokens)) if sequence in node.holders), default=0
        )

    def nodes_of(self, sequence: int) -> Iterator[Node]:
        """Yield the nodes that the sequence holds, from the deepest up to the first one."""
        node = self._leaf.get(sequence)
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def share(self, sequence: int, path: Path, end: int) -> None:
        """Record that `sequence` shares the cells of tokens [0, end), which others hold according to `match`."""
        self._hold(sequence, path, end, shared=True)

    def extend(self, sequence: int, path: Path, end: int) -> int:
        """Enter the sequence's cells up to `end` into the index, and return the position reached. Stop at the first
        token that has cells of other sequences in the index: the index lists the cells of each token only once."""
        return self._hold(sequence, path, end, shared=False)

    def release(self, sequence: int, start: int = 0) -> int:
        """Remove the sequence's cells, the first `start` excepted, from the index; return how many only it held."""
        num_freed = 0
        self.num_releases += 1
        node: Node | None = self._leaf.pop(sequence, None)
        lowest = node
        """The deepest node of the sequence's path that is not pruned."""
        while node is not None and node.parent is not None and node.end > start:
            if node.start < start:
                split(node, start - node.start)
            parent = node.parent
            node.holders.discard(sequence)
            if not node.holders:
                num_freed += len(node.tokens)
                kept = prune(node)
                lowest = kept if node is lowest else lowest
            node = parent
        if node is not None and node.parent is not None:
            self._leaf[sequence] = node
        if lowest is not None:
            join(lowest)
        self.num_cells -= num_freed
        self.num_losses += num_freed > 0
        return num_freed

    def num_exclusive(self, sequence: int) -> int:
        """Return how many cells only this sequence holds: they would be free without it."""
        return sum(len(node.tokens) for node in self.nodes_of(sequence) if len(node.holders) == 1)

    def ends_above(self, sequence: int, other: int) -> bool:
        """Return whether `other` holds everything that `sequence` holds."""
        leaf = self._leaf.get(sequence)
        return leaf is None or other in leaf.holders

    def unsaved(self, sequence: int, size: int) -> list[tuple[int, int]]:
        """Return the ranges to save before the sequence's cells are freed: those that no other sequence holds and no
        block covers.

        They begin and end at multiples of `size` tokens as far as the sequence is long enough, so that later sequences
        find the same ranges."""
        pieces: set[tuple[int, int]] = set()
        end = self.held_by(sequence)
        for node in self.nodes_of(sequence):
            if len(node.holders) > 1:
                break
            number, saved_to = 0, 0
            for start in range(node.start // size * size, node.end, size):
                first, last = max(start, node.start), min(start + size, node.end)
                while number < len(node.blocks) and node.blocks[number].start <= first:
                    saved_to = max(saved_to, node.blocks[number].end)
                    number += 1
                if saved_to < last:
                    pieces.add((start, min(start + size, end)))
        return sorted(pieces)

    def store(self, sequence: int, block: Block, spared: Spared = nothing) -> list[Block]:
        """Enter a block, saved from the sequence's cells, at the nodes with its tokens. Drop the older blocks that it
        covers, except those that end earlier and that `spared` says to keep. Return the dropped blocks."""
        for node in self.nodes_of(sequence):
            if node.start < block.end and block.start < node.end:
                node.attach(block)
        return self._drop_needless(block, spared)

    def put(self, path: Path, block: Block, spared: Spared = nothing) -> list[Block]:
        """Enter a saved block at the nodes with tokens [block.start, block.end) of `path`, which are made if they are
        missing. Drop blocks that it covers, as `store` does, and return them."""
        node = self.root
        while node.end < block.end:
            node = onwards(node, path, block.end)
            if block.start < node.end:
                node.attach(block)
        return self._drop_needless(block, spared)

    def own_blocks(self, path: Path) -> list[Block]:
        """Return the saved blocks of this path alone: tokens not public, on no other path and held by no sequence."""
        found: dict[Block, None] = {}
        below: Node | None = None
        for node, end in reversed(list(walk(self.root, path, len(path.tokens)))):
            others = any(child is not below for child in node.children.values())
            if node.holders or others or end < node.end or end <= path.num_public:
                break
            found |= dict.fromkeys(node.blocks)
            below = node
        return list(found)

    def drop(self, block: Block) -> None:
        """Remove a block from the index."""
        nodes = sorted(block.nodes, key=lambda node: -node.start)
        self.num_losses += 1
        for node in nodes:
            node.detach(block)
        for node in nodes[:1]:  # the others lead to it
            join(prune(node))

    def mark(self, sequence: int, end: int, block: Block) -> list[Block]:
        """Enter a checkpoint at `end` of the sequence's path, splitting a node if need be; return those it replaced."""
        for node in self.nodes_of(sequence):
            if node.start < end <= node.end:
                (node if node.end == end else split(node, end - node.start)).attach(block)
                return self._drop_needless(block)
        return []

    def check(self) -> None:
        """Raise ValueError if nodes, holders, blocks and counts of the tree contradict each other."""
        held = 0
        seen: dict[int, int] = {}
        for node in self._all():
            for key, child in node.children.items():
                if child.parent is not node or key != (child.scope, int(child.tokens[0])) or child.start != node.end:
                    raise ValueError(f"the node at {child.start} is not where its parent has it")
                if node is not self.root and not child.holders <= node.holders:
                    raise ValueError(f"sequences {child.holders - node.holders} hold {child.start} without its prefix")
            if node is not self.root and not (node.holders or node.blocks or node.children):
                raise ValueError(f"the node at {node.start} stands for nothing")
            if node.blocks != sorted(node.blocks, key=start_of) or any(node not in one.nodes for one in node.blocks):
                raise ValueError(f"the blocks of the node at {node.start} are not in order")
            if node is not self.root and node.num_forks != num_forks_below(node):
                raise ValueError(f"the forks below the node at {node.start} are counted wrongly")
            held += len(node.tokens) if node.holders else 0
            for sequence in node.holders:
                seen[sequence] = max(seen.get(sequence, 0), node.end)
        if held != self.num_cells:
            raise ValueError(f"{held} cells are held, {self.num_cells} counted")
        if seen != {sequence: leaf.end for sequence, leaf in self._leaf.items() if leaf.end}:
            raise ValueError(f"holders {seen} do not end where they should")

    def _all(self) -> Iterator[Node]:
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _hold(self, sequence: int, path: Path, end: int, *, shared: bool) -> int:
        node = self._leaf.get(sequence, self.root)
        while node.end < end:
            position = node.end
            child = child_along(node, path, position, end)
            if child is None:
                child = self._append(node, path, position, end, sequence)
            elif child.holders and not shared:
                break
            if sequence not in child.holders:
                if not child.holders:
                    self.num_cells += len(child.tokens)
                child.holders.add(sequence)
            node = self._leaf[sequence] = child
        return node.end

    def _drop_needless(self, new: Block, spared: Spared = nothing) -> list[Block]:
        known = {block for node in new.nodes for block in node.from_within(new) if block is not new}
        needless = [
            b for b in known if _covers(new, b) and b.nodes <= new.nodes and not (b.end < new.end and spared(b))
        ]
        for block in needless:
            self.drop(block)
        return needless

    def _append(self, node: Node, path: Path, position: int, end: int, sequence: int) -> Node:
        """Return a node with the path's next tokens: `node` itself if only this sequence uses it, or a new child."""
        join(node)
        alone = node.holders == {sequence} and not node.children and not node.is_marked
        if node.parent is None or not alone or node.scope != path.scope_at(position):
            return branch(node, path, position, end)
        end = min(end, path.run_end(position))
        node.tokens = np.concatenate((node.tokens, path.tokens[position:end]))
        self.num_cells += end - position
        return node


def _covers(new: Block, old: Block) -> bool:
    if old.start == old.end or new.start == new.end:
        return (new.start, new.end) == (old.start, old.end)
    return new.start <= old.start and old.end <= new.end
