"""The nodes of the radix tree: runs of tokens, the sequences that hold their cells, and saved copies of these cells.

A node stands for a run of tokens after those of its parent. Sequences that hold the run's cells are its `holders`;
saved copies of parts of it are its `blocks`. Tokens of different scopes (tenant, salt, adapters) never share a node: a
scope is part of a child's key. A fork is a place where a node has several children.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from workers.engine.cache.prompt import BLOCK_TOKENS, Path, Scope, Tokens, common, links

MAX_FORKS = 256
"""Maximum number of forks on one path from the root, since a lookup takes 5 us for each. On a path with more, saved
blocks below a fork are crowded (`is_crowded`) and not kept."""

MANY_PATHS = 8
"""Blocks below a fork with more children than this are never crowded: dropping one of so many speeds up no lookup."""


@dataclass(eq=False, slots=True)
class Block:
    """The saved state of the cells [start, end) of a path; `nodes` are the nodes with these tokens.

    An empty block (`start` = `end`) is a checkpoint. It holds only the part of the model's state after `end` tokens
    that can't be cut into ranges of tokens, such as a recurrent state."""

    start: int
    end: int
    state: bytes
    nodes: set[Node] = field(default_factory=set)
    touched: float = 0.0
    """Time of the last use, `time.monotonic` seconds."""


start_of = attrgetter("start")
NO_TOKENS: Tokens = np.empty(0, np.int32)


class Node:
    """A node of the index: the tokens [start, end) of every path through it.

    A long conversation is one node with a block for every few tokens, looked up at every admission. So its blocks are
    sorted, and a walk along the tokens passes them only once."""

    __slots__ = (
        *("blocks", "children", "digests", "holders", "longest", "num_forks", "parent", "scope", "start", "tokens"),
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
        """Number of tokens of the longest block that was ever attached here: no block in `blocks` is longer."""
        self.digests: list[bytes] = []
        """Digests that name the node's blocks on disk: links of the digest chain (`digest_at`), as far as computed."""
        self.num_forks = 0
        """Maximum number of forks on any path down from this node; a fork at the node's own end counts."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_public(self) -> int:
        """Return how many tokens, from the root to this node's end, are public: shared by all teams."""
        node: Node | None = self
        while node is not None and node.scope is not None:
            if node.scope.tenant is None:
                return node.end
            node = node.parent
        return 0

    def leading(self, start: int, end: int) -> Tokens:
        """Return the tokens [start, end) of the path from the root through this node."""
        runs, node = [NO_TOKENS], self
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
        """Return the only child if it can join this node: same holders and scope, no checkpoint between. Else None."""
        if self.parent is None or len(self.children) != 1 or self.is_marked:
            return None
        (child,) = self.children.values()
        return child if child.scope == self.scope and child.holders == self.holders else None

    def attach(self, block: Block) -> None:
        insort(self.blocks, block, key=start_of)
        self.longest = max(self.longest, block.end - block.start)
        block.nodes.add(self)

    def detach(self, block: Block) -> None:
        del self.blocks[self.blocks.index(block, bisect_left(self.blocks, block.start, key=start_of))]
        block.nodes.discard(self)

    def first_over(self, position: int) -> int:
        """Return the index in `blocks` of the first block that may cover the position."""
        return bisect_left(self.blocks, position - self.longest, key=start_of)

    def from_within(self, block: Block) -> list[Block]:
        """Return the blocks that begin within `block` or at its end."""
        first = bisect_left(self.blocks, block.start, key=start_of)
        return self.blocks[first : bisect_right(self.blocks, block.end, key=start_of)]


def walk(root: Node, path: Path, limit: int) -> Iterator[tuple[Node, int]]:
    """Yield the nodes along the path, each with the position up to which its tokens are the same as the path's."""
    node, position = root, 0
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


def child_along(node: Node, path: Path, position: int, end: int) -> Node | None:
    """Return the child of `node` along the path, or None. Splits it first if it leaves the path or passes `end`."""
    child = node.children.get((path.scope_at(position), int(path.tokens[position])))
    if child is None:
        return None
    num_common = common(child.tokens, path.tokens[position : min(end, path.run_end(position))])
    return child if num_common == len(child.tokens) else split(child, num_common)


def onwards(node: Node, path: Path, end: int) -> Node:
    """Return the child of `node` along the path. If there is none, it is made; if it leaves the path, it is split there
    first. Unlike in `child_along`, it may go beyond `end`."""
    position = node.end
    child = node.children.get((path.scope_at(position), int(path.tokens[position])))
    if child is None:
        return branch(node, path, position, end)
    num_common = common(child.tokens, path.tokens[position : min(end, path.run_end(position))])
    if num_common == len(child.tokens) or position + num_common == end:
        return child
    return split(child, num_common)


def branch(node: Node, path: Path, position: int, end: int) -> Node:
    scope = path.scope_at(position)
    tokens = path.tokens[position : min(end, path.run_end(position))].copy()
    child = node.children[scope, int(tokens[0])] = Node(tokens, position, node, scope)
    recount(node)
    return child


def split(node: Node, length: int) -> Node:
    """Cut a node after `length` tokens; return the upper part, a new node. `node` becomes the lower part."""
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
    prune(node)  # if its holders have gone without saving it, all blocks may belong to the upper part
    return upper


def join(node: Node) -> None:
    """Merge `node` with neighbours above and below where `continuation` allows it. The lowest `Node` gets all tokens.

    Without this, a long conversation would stay split at every length that was ever looked up."""
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


def prune(node: Node) -> Node:
    """Remove nodes without holders, blocks and children, from `node` upwards; return the first node that stays."""
    while node.parent is not None and not (node.holders or node.blocks or node.children):
        parent = node.parent
        if node.scope is not None:
            parent.children.pop((node.scope, int(node.tokens[0])), None)
            recount(parent)
        node = parent
    return node


def recount(node: Node) -> None:
    """Update `num_forks` from `node` upwards, after it got or lost a child without forks."""
    if len(node.children) > 2:
        return
    while node.parent is not None and (num_forks := num_forks_below(node)) != node.num_forks:
        node.num_forks = num_forks
        node = node.parent


def is_crowded(block: Block) -> bool:
    """Return whether the last fork above the block is private and on a path of over MAX_FORKS forks; see MANY_PATHS."""
    node = max(block.nodes, key=lambda node: node.end).parent
    while node is not None and len(node.children) < 2:
        node = node.parent
    if node is None or node.scope is None or node.scope.tenant is None or len(node.children) > MANY_PATHS:
        return False
    num_forks = node.num_forks
    while (node := node.parent) is not None:
        num_forks += len(node.children) > 1
    return num_forks > MAX_FORKS


def num_forks_below(node: Node) -> int:
    return max((child.num_forks for child in node.children.values()), default=0) + (len(node.children) > 1)


def is_fork(block: Block) -> bool:
    """Return whether several paths go on, with different tokens, where the block ends."""
    last = max(block.nodes, key=lambda node: node.end)
    return last.end == block.end and len(last.children) > 1


def digest_at(node: Node, end: int) -> bytes:
    """Return the digest of the tokens from the root through `node` up to the last full block that ends by `end`; empty:
    there is no full block.

    Nodes keep their digests, so that each block of a conversation is hashed only once."""
    line = [node]
    while node.parent is not None and not (node.digests and end // BLOCK_TOKENS > node.start // BLOCK_TOKENS):
        node = node.parent
        line.append(node)
    digest = b""
    for node in reversed(line):
        digest = _chained(node, min(end, node.end), digest)
    return digest


def _chained(node: Node, end: int, digest: bytes) -> bytes:
    """Compute the node's digests up to `end` and return the last one. `digest`: the last digest before the node."""
    first, last = node.start // BLOCK_TOKENS, end // BLOCK_TOKENS
    known = first + len(node.digests)
    if known < last and node.scope is not None:
        data = memoryview(node.leading(known * BLOCK_TOKENS, last * BLOCK_TOKENS).tobytes())
        seeds, num_open = (node.scope.seed, node.scope.public.seed), node.num_public // BLOCK_TOKENS
        before = node.digests[-1] if node.digests else digest
        node.digests += links(seeds[0], data, BLOCK_TOKENS * 4, seeds[1], num_open, first=known, digest=before)
    return node.digests[last - first - 1] if last > first else digest
