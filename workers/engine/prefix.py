"""The radix index: every prefix whose KV is in the cache or saved in RAM, by the tokens that it was computed from.

A node stands for a run of tokens after those of its parent. Sequences that hold the run's cells are its `holders`;
saved copies of parts of it are its `blocks`. A sequence that holds a node holds all nodes above it too, so the cached
nodes are closed towards the root. Runs of different scopes (tenant, salt, adapters) never meet: a scope is part of a
child's key. The index knows nothing of llama.cpp: sequence ids are numbers, and the caller moves the cells.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from workers.engine.disk_names import BLOCK_TOKENS, links
from workers.engine.scope import Scope

Tokens = NDArray[np.int32]


MAX_FORKS = 256
"""Most forks that saved blocks keep on one way down from the root: a lookup along it takes 5 us for each."""

MANY_PATHS = 8
"""Most children of a node that can be crowded; where more fork, as after a template, one more makes no way longer."""


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens of one conversation, with their scope."""

    tokens: Tokens
    scope: Scope
    num_public: int = 0
    """Tokens at the beginning that belong to everyone."""

    def scope_at(self, position: int) -> Scope:
        return self.scope.public if position < self.num_public else self.scope

    def run_end(self, position: int) -> int:
        """Return the position where the scope of `position` ends."""
        return min(self.num_public, len(self.tokens)) if position < self.num_public else len(self.tokens)


@dataclass(eq=False, slots=True)
class Block:
    """The saved state of the cells [start, end) of some sequence; for tokens before them see the node's parents.

    An empty one (`start` = `end`) is a checkpoint: the part of a memory's state there that can't be shared by range.
    """

    start: int
    end: int
    state: bytes
    nodes: set[Node] = field(default_factory=set)
    touched: float = 0.0
    """Time of the last use, `time.monotonic` seconds."""


_start_of = attrgetter("start")
_NO_TOKENS: Tokens = np.empty(0, np.int32)


class Node:
    """A node of the index: the tokens [start, end) of every path through it.

    A long conversation is one node with a block for every few tokens, looked up at every admission. So its blocks are
    in order, and a walk along the tokens goes along the blocks once.
    """

    __slots__ = (
        "blocks",
        "children",
        "digests",
        "holders",
        "longest",
        "num_forks",
        "parent",
        "scope",
        "start",
        "tokens",
    )

    def __init__(self, tokens: Tokens, start: int, parent: Node | None, scope: Scope | None) -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.scope = scope
        self.children: dict[tuple[Scope, int], Node] = {}
        self.holders: set[int] = set()
        self.blocks: list[Block] = []
        """Blocks, sorted by start."""
        self.longest = 0
        """Most tokens of a block."""
        self.digests: list[bytes] = []
        """Digests for names on disk: the chain's links (`disk_names`) that end within it, the first few or all."""
        self.num_forks = 0
        """Ends of nodes where paths fork, on the way down that has most of them; its own end counts."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_public(self) -> int:
        """Return the public tokens at the beginning of the path to and into the node."""
        node: Node | None = self
        while node is not None and node.scope is not None:
            if node.scope.tenant is None:
                return node.end
            node = node.parent
        return 0

    def leading(self, start: int, end: int) -> Tokens:
        """Return the tokens [start, end) of the path to and into the node."""
        runs, node = [_NO_TOKENS], self
        while node.parent is not None and start < node.end:
            runs.append(node.tokens[max(0, start - node.start) : max(0, end - node.start)])
            node = node.parent
        return np.concatenate(runs[::-1])

    @property
    def is_marked(self) -> bool:
        """Return whether there is a checkpoint at the node's end."""
        return bool(self.blocks) and self.blocks[-1].start == self.end

    @property
    def continuation(self) -> Node | None:
        """Return the only child if it could be merged with this node, since nothing ends between the two; else None."""
        if self.parent is None or len(self.children) != 1 or self.is_marked:
            return None
        (child,) = self.children.values()
        return child if child.scope == self.scope and child.holders == self.holders else None

    def attach(self, block: Block) -> None:
        insort(self.blocks, block, key=_start_of)
        self.longest = max(self.longest, block.end - block.start)
        block.nodes.add(self)

    def detach(self, block: Block) -> None:
        del self.blocks[self.blocks.index(block, bisect_left(self.blocks, block.start, key=_start_of))]
        block.nodes.discard(self)

    def first_over(self, position: int) -> int:
        """Return the number of the first block that may cover the position."""
        return bisect_left(self.blocks, position - self.longest, key=_start_of)

    def from_within(self, block: Block) -> list[Block]:
        """Return the blocks that begin within `block`, or where it ends."""
        first = bisect_left(self.blocks, block.start, key=_start_of)
        return self.blocks[first : bisect_right(self.blocks, block.end, key=_start_of)]


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


Spared = Callable[[Block], bool]
"""Tells which shorter blocks a longer one does not replace, since their state can be used at their end only."""


def nothing(block: Block) -> bool:
    """Return False: every shorter block is replaced, since a range can be cut out of a longer one."""
    return False


class PrefixIndex:
    """The radix index. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.root = Node(_NO_TOKENS, 0, None, None)
        self.num_cells = 0
        """Cells that the nodes' holders hold, shared ones counted once."""
        self.num_losses = 0
        """Times that something which was known may have been lost."""
        self.num_releases = 0
        """Times that a sequence was released: another one may have its id since."""
        self._leaf: dict[int, Node] = {}

    def match(self, path: Path, limit: int, start: int = 0) -> Match:
        """Return what is known of the first `limit` tokens, and of those from `start` on even if others are missing."""
        steps = list(self._walk(path, limit))
        num_held, holder = 0, -1
        for node, end in steps:
            if not node.holders:
                break
            num_held, holder = end, next(iter(node.holders))
        return Match(num_held, holder, tuple(_restores(steps, max(num_held, start))))

    def match_checkpoint(self, path: Path, limit: int) -> Checkpoint:
        """Return the longest known prefix of memory that can continue only where a checkpoint was saved.

        Of two of one length, return the one whose cells are in the cache: it takes no more of them.
        """
        best = Checkpoint(0, -1, None)
        for found in self._checkpoints(path, limit):
            if (found.end, found.holder != -1) > (best.end, best.holder != -1):
                best = found
        return best

    def stops(self, path: Path, limit: int) -> tuple[int, ...]:
        """Return the lengths where such memory can continue the path, ascending."""
        return tuple(sorted({found.end for found in self._checkpoints(path, limit)}))

    def num_common(self, path: Path, limit: int) -> int:
        """Return how many of the path's tokens are in the index, cached or not."""
        return max((end for _, end in self._walk(path, limit)), default=0)

    def held_by(self, sequence: int) -> int:
        """Return how many tokens of the sequence are in the index."""
        leaf = self._leaf.get(sequence)
        return leaf.end if leaf is not None else 0

    def held_in(self, sequence: int, path: Path) -> int:
        """Return how many of the path's tokens, from its beginning, the sequence holds."""
        return max((end for node, end in self._walk(path, len(path.tokens)) if sequence in node.holders), default=0)

    def nodes_of(self, sequence: int) -> Iterator[Node]:
        """Yield the nodes that the sequence holds, from the deepest up to the first one."""
        node = self._leaf.get(sequence)
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def share(self, sequence: int, path: Path, end: int) -> None:
        """Enter that `sequence` shares the cells of [0, end), which others hold according to `match`."""
        self._hold(sequence, path, end, shared=True)

    def extend(self, sequence: int, path: Path, end: int) -> int:
        """Enter the sequence's own cells, from its place in the index up to `end`; return how far that went.

        It stops before tokens that others hold already: those cells are twice in the cache, and stay out of the index.
        """
        return self._hold(sequence, path, end, shared=False)

    def release(self, sequence: int, start: int = 0) -> int:
        """Take the sequence's cells from `start` on out of the index; return how many of them only it held."""
        num_freed = 0
        self.num_releases += 1
        node: Node | None = self._leaf.pop(sequence, None)
        lowest = node
        """The lowest node that stays, on the way to the sequence's deepest node."""
        while node is not None and node.parent is not None and node.end > start:
            if node.start < start:
                self._split(node, start - node.start)
            parent = node.parent
            node.holders.discard(sequence)
            if not node.holders:
                num_freed += len(node.tokens)
                kept = self.prune(node)
                lowest = kept if node is lowest else lowest
            node = parent
        if node is not None and node.parent is not None:
            self._leaf[sequence] = node
        if lowest is not None:
            self._join(lowest)
        self.num_cells -= num_freed
        self.num_losses += num_freed > 0
        return num_freed

    def num_exclusive(self, sequence: int) -> int:
        """Return the cells that would be free without the sequence."""
        return sum(len(node.tokens) for node in self.nodes_of(sequence) if len(node.holders) == 1)

    def ends_above(self, sequence: int, other: int) -> bool:
        """Return whether `other` holds everything that `sequence` holds."""
        leaf = self._leaf.get(sequence)
        return leaf is None or other in leaf.holders

    def unsaved(self, sequence: int, size: int) -> list[tuple[int, int]]:
        """Return the ranges to save before the sequence's cells are freed: no other holds them, no block covers them.

        They are whole multiples of `size` tokens where the sequence is long enough, so that the next one finds them.
        """
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
        """Attach a block saved from the sequence's cells; return the older blocks that it replaced, now dropped."""
        for node in self.nodes_of(sequence):
            if node.start < block.end and block.start < node.end:
                node.attach(block)
        return self._drop_needless(block, spared)

    def put(self, path: Path, block: Block, spared: Spared = nothing) -> list[Block]:
        """Attach a block that comes from elsewhere, [block.start, block.end) of `path`; return as `store`."""
        node = self.root
        while node.end < block.end:
            node = self._onwards(node, path, block.end)
            if block.start < node.end:
                node.attach(block)
        return self._drop_needless(block, spared)

    def own_blocks(self, path: Path) -> list[Block]:
        """Return the saved blocks that only this path leads to and no sequence holds, without public ones."""
        found: dict[Block, None] = {}
        below: Node | None = None
        for node, end in reversed(list(self._walk(path, len(path.tokens)))):
            others = any(child is not below for child in node.children.values())
            if node.holders or others or end < node.end or end <= path.num_public:
                break
            found |= dict.fromkeys(node.blocks)
            below = node
        return list(found)

    def drop(self, block: Block) -> None:
        """Forget a block."""
        nodes = sorted(block.nodes, key=lambda node: -node.start)
        self.num_losses += 1
        for node in nodes:
            node.detach(block)
        for node in nodes[:1]:  # the others lead to it
            self._join(self.prune(node))

    def mark(self, sequence: int, end: int, block: Block) -> list[Block]:
        """Attach a checkpoint to the sequence's path at `end`, splitting a node there; return as `store`."""
        for node in self.nodes_of(sequence):
            if node.start < end <= node.end:
                (node if node.end == end else self._split(node, end - node.start)).attach(block)
                return self._drop_needless(block)
        return []

    def prune(self, node: Node) -> Node:
        """Remove nodes that stand for nothing any more, upwards from `node`; return the first one that stays."""
        while node.parent is not None and not (node.holders or node.blocks or node.children):
            parent = node.parent
            if node.scope is not None:
                parent.children.pop((node.scope, int(node.tokens[0])), None)
                self._recount(parent)
            node = parent
        return node

    def is_crowded(self, block: Block) -> bool:
        """Return whether the block's path forks off on a way down with too many forks, all of one team."""
        node = max(block.nodes, key=lambda node: node.end).parent
        while node is not None and len(node.children) < 2:
            node = node.parent
        if node is None or node.scope is None or node.scope.tenant is None or len(node.children) > MANY_PATHS:
            return False
        num_forks = node.num_forks
        while (node := node.parent) is not None:
            num_forks += len(node.children) > 1
        return num_forks > MAX_FORKS

    def check(self) -> None:
        """Raise ValueError where the tree contradicts itself."""
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
            if node.blocks != sorted(node.blocks, key=_start_of) or any(node not in one.nodes for one in node.blocks):
                raise ValueError(f"the blocks of the node at {node.start} are not in order")
            if node is not self.root and node.num_forks != _num_forks(node):
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

    def _walk(self, path: Path, limit: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes along the path, each with the position up to which it agrees with the path."""
        node, position = self.root, 0
        limit = min(limit, len(path.tokens))
        while position < limit:
            child = node.children.get((path.scope_at(position), int(path.tokens[position])))
            if child is None:
                return
            end = position + common(child.tokens, path.tokens[position : min(limit, path.run_end(position))])
            yield child, end
            if end < child.end:
                return
            node, position = child, end

    def _checkpoints(self, path: Path, limit: int) -> Iterator[Checkpoint]:
        steps = list(self._walk(path, limit))
        for number, (node, end) in enumerate(steps):
            for block in node.blocks:
                whole = block.start < block.end
                reach = _reach(block, steps, number) if whole else end
                if block.end == reach and (whole or node.holders):
                    yield Checkpoint(block.end, -1 if whole else next(iter(node.holders)), block)

    def _hold(self, sequence: int, path: Path, end: int, *, shared: bool) -> int:
        node = self._leaf.get(sequence, self.root)
        while node.end < end:
            position = node.end
            child = self._child(node, path, position, end)
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

    def _child(self, node: Node, path: Path, position: int, end: int) -> Node | None:
        """Return the child of `node` along the path, split so that all of it agrees and none is past `end`."""
        child = node.children.get((path.scope_at(position), int(path.tokens[position])))
        if child is None:
            return None
        num_common = common(child.tokens, path.tokens[position : min(end, path.run_end(position))])
        return child if num_common == len(child.tokens) else self._split(child, num_common)

    def _onwards(self, node: Node, path: Path, end: int) -> Node:
        """Return the child of `node` along the path, made where there is none. It may go on past `end`."""
        position = node.end
        child = node.children.get((path.scope_at(position), int(path.tokens[position])))
        if child is None:
            return self._branch(node, path, position, end)
        num_common = common(child.tokens, path.tokens[position : min(end, path.run_end(position))])
        if num_common == len(child.tokens) or position + num_common == end:
            return child
        return self._split(child, num_common)

    def _append(self, node: Node, path: Path, position: int, end: int, sequence: int) -> Node:
        """Return a node with the path's next tokens: the node itself if only this sequence uses it, else a new one."""
        self._join(node)
        alone = node.holders == {sequence} and not node.children and not node.is_marked
        if node.parent is None or not alone or node.scope != path.scope_at(position):
            return self._branch(node, path, position, end)
        end = min(end, path.run_end(position))
        node.tokens = np.concatenate((node.tokens, path.tokens[position:end]))
        self.num_cells += end - position
        return node

    def _branch(self, node: Node, path: Path, position: int, end: int) -> Node:
        scope = path.scope_at(position)
        tokens = path.tokens[position : min(end, path.run_end(position))].copy()
        child = node.children[scope, int(tokens[0])] = Node(tokens, position, node, scope)
        self._recount(node)
        return child

    def _recount(self, node: Node) -> None:
        """Count the forks again, upwards, since `node` got or lost a child without forks."""
        if len(node.children) > 2:
            return
        while node.parent is not None and (num_forks := _num_forks(node)) != node.num_forks:
            node.num_forks = num_forks
            node = node.parent

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after `length` tokens; return the upper part, a new node. The lower part keeps its identity."""
        parent, scope = node.parent, node.scope
        if parent is None or scope is None:
            raise ValueError("the root has nothing to split")
        upper = Node(node.tokens[:length].copy(), node.start, parent, scope)
        parent.children[scope, int(upper.tokens[0])] = upper
        node.tokens = node.tokens[length:].copy()
        node.start += length
        node.parent = upper
        upper.children[scope, int(node.tokens[0])] = node
        upper.holders = set(node.holders)
        num_links = upper.end // BLOCK_TOKENS - upper.start // BLOCK_TOKENS
        upper.digests, node.digests = node.digests[:num_links], node.digests[num_links:]
        upper.longest, upper.num_forks = node.longest, node.num_forks
        upper.blocks = [block for block in node.blocks if block.start < upper.end]
        for block in upper.blocks:
            block.nodes.add(upper)
            if block.end <= node.start:
                block.nodes.discard(node)
        node.blocks = [block for block in node.blocks if block.end > node.start]
        self.prune(node)  # its holders may have gone without saving it: all blocks may be the upper part's
        return upper

    def _join(self, node: Node) -> None:
        """Merge the nodes around `node` that nothing ends between into one, the lowest of them.

        Else every length that was ever asked for would split a long conversation for as long as any of it is known.
        """
        while (below := node.continuation) is not None:
            node = below
        line = [node]
        while (parent := line[-1].parent) is not None and parent.continuation is not None:
            line.append(parent)
        top = line[-1]
        if top is node or top.parent is None or node.scope is None:
            return
        blocks = dict.fromkeys(block for one in reversed(line) for block in one.blocks)
        for one in line[1:]:
            for block in one.blocks:
                block.nodes.discard(one)
                block.nodes.add(node)
            one.holders.clear()  # a loop that still goes through a list of nodes skips it
        digests: list[bytes] = []
        for one in reversed(line):
            digests += one.digests
            if len(one.digests) < one.end // BLOCK_TOKENS - one.start // BLOCK_TOKENS:
                break
        node.digests = digests
        node.tokens = np.concatenate([one.tokens for one in reversed(line)])
        node.start, node.parent = top.start, top.parent
        node.blocks, node.longest = list(blocks), max(one.longest for one in line)
        node.parent.children[node.scope, int(node.tokens[0])] = node


def _num_forks(node: Node) -> int:
    return max((child.num_forks for child in node.children.values()), default=0) + (len(node.children) > 1)


def _covers(new: Block, old: Block) -> bool:
    if old.start == old.end or new.start == new.end:
        return (new.start, new.end) == (old.start, old.end)
    return new.start <= old.start and old.end <= new.end


def is_fork(block: Block) -> bool:
    """Return whether paths fork where the block ends."""
    last = max(block.nodes, key=lambda node: node.end)
    return last.end == block.end and len(last.children) > 1


def common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two runs have in common at their beginning."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _restores(steps: list[tuple[Node, int]], position: int) -> Iterator[Restore]:
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


def _reach(block: Block, steps: list[tuple[Node, int]], here: int) -> int:
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


def digest_at(node: Node, end: int) -> bytes:
    """Return the last link, up to `end`, of the digest chain over the tokens to and into a node; empty: there is none.

    Links are kept in the nodes, so that all blocks of a conversation together take one digest each.
    """
    line = [node]
    while node.parent is not None and not (node.digests and end // BLOCK_TOKENS > node.start // BLOCK_TOKENS):
        node = node.parent
        line.append(node)
    digest = b""
    for node in reversed(line):
        digest = _chained(node, min(end, node.end), digest)
    return digest


def _chained(node: Node, end: int, digest: bytes) -> bytes:
    """Compute the node's links up to `end` and return the last one. `digest`: the last link before the node's."""
    first, last = node.start // BLOCK_TOKENS, end // BLOCK_TOKENS
    known = first + len(node.digests)
    if known < last and node.scope is not None:
        data = memoryview(node.leading(known * BLOCK_TOKENS, last * BLOCK_TOKENS).tobytes())
        seeds, num_open = (node.scope.seed, node.scope.public.seed), node.num_public // BLOCK_TOKENS
        before = node.digests[-1] if node.digests else digest
        node.digests += links(seeds[0], data, BLOCK_TOKENS * 4, seeds[1], num_open, first=known, digest=before)
    return node.digests[last - first - 1] if last > first else digest
