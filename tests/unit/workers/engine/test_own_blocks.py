"""Which saved parts go when one conversation is forgotten."""

from __future__ import annotations

import numpy as np

from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import Path, Scope

RED, BLUE = Scope("red"), Scope("blue")


def path(*tokens: int, scope: Scope = RED, num_public: int = 0) -> Path:
    return Path(np.array(tokens, np.int32), scope, num_public)


def put(index: PrefixIndex, where: Path, start: int, end: int) -> Block:
    block = Block(start, end, b"x")
    index.put(where, block)
    return block


def forget(index: PrefixIndex, where: Path) -> set[Block]:
    gone = index.own_blocks(where)
    for block in gone:
        index.drop(block)
    index.check()
    return set(gone)


def test_all_parts_of_a_conversation_alone_go() -> None:
    index = PrefixIndex()
    parts = {put(index, path(1, 2, 3, 4), start, start + 2) for start in (0, 2)}
    assert forget(index, path(1, 2, 3, 4)) == parts
    assert index.match(path(1, 2, 3, 4), 4).num_known == 0


def test_what_another_conversation_goes_through_stays() -> None:
    index = PrefixIndex()
    shared = put(index, path(1, 2, 3, 4), 0, 2)
    own = put(index, path(1, 2, 3, 4), 2, 4)
    other = put(index, path(1, 2, 9, 9), 2, 4)
    assert forget(index, path(1, 2, 3, 4)) == {own}
    assert index.match(path(1, 2, 9, 9), 4).num_known == 4
    assert forget(index, path(1, 2, 9, 9)) == {other, shared}


def test_what_is_longer_held_or_another_teams_stays() -> None:
    index = PrefixIndex()
    put(index, path(1, 2, 3, 4), 0, 4)
    assert forget(index, path(1, 2, 3)) == set(), "the conversation goes on elsewhere"
    assert forget(index, path(1, 2, 3, 4, scope=BLUE)) == set()
    index.share(7, path(1, 2, 3, 4), 4)
    assert forget(index, path(1, 2, 3, 4)) == set()


def test_what_is_everybodys_stays() -> None:
    index = PrefixIndex()
    where = path(1, 2, 3, 4, num_public=2)
    put(index, where, 0, 2)
    own = put(index, where, 2, 4)
    assert forget(index, where) == {own}
    assert index.match(path(1, 2, 5, scope=BLUE, num_public=2), 3).num_known == 2


def test_a_part_that_nobody_saved_leaves_nothing_behind() -> None:
    """A sequence grew from a saved prefix and went unsaved; the next path splits what is left."""
    index = PrefixIndex()
    put(index, path(1), 0, 1)
    index.share(0, path(1), 1)
    index.extend(0, path(1, 2), 2)
    index.release(0)
    index.extend(1, path(1), 1)
    index.check()
