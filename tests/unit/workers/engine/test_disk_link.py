"""What blocks are called that leave RAM for the disk, and what finding that out takes; without files."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine import disk_names
from workers.engine.disk import DiskTier
from workers.engine.disk_link import DiskLink
from workers.engine.disk_names import BLOCK_TOKENS, BlockName, StateNames, block_names
from workers.engine.pace import MovePace, PrefillPace
from workers.engine.prefix import Block, Path, PrefixIndex
from workers.engine.scope import Scope

TEAM = Scope("team")


class Listed:
    """Takes what a disk tier would write."""

    def __init__(self) -> None:
        self.names: list[BlockName] = []

    def put(self, name: BlockName, state: bytes) -> bool:
        self.names.append(name)
        return True


def name_of(block: Block, *, by_range: bool = True) -> BlockName:
    listed = Listed()
    link = DiskLink(cast(DiskTier, listed), MovePace(PrefillPace(32, 512)), by_range, post=lambda act: act())
    link.evicted(block)
    return listed.names[0]


def blocks_of(path: Path) -> list[Block]:
    ends = range(BLOCK_TOKENS, len(path.tokens) + 1, BLOCK_TOKENS)
    return [Block(end - BLOCK_TOKENS, end, b"state") for end in ends]


def saved(index: PrefixIndex, path: Path) -> list[Block]:
    blocks = blocks_of(path)
    for block in blocks:
        index.put(path, block)
    return blocks


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each digest was made of."""
    sizes: list[int] = []
    linked = disk_names._linked

    def counted(data: bytes | memoryview, key: bytes) -> bytes:
        sizes.append(len(data) // 4)
        return linked(data, key)

    monkeypatch.setattr(disk_names, "_linked", counted)
    return sizes


@pytest.mark.parametrize("by_range", [True, False])
def test_each_token_of_a_long_conversation_is_hashed_once(hashed: list[int], by_range: bool) -> None:
    path, index = Path(np.arange(128 << 10, dtype=np.int32), TEAM), PrefixIndex()
    for start in range(0, len(path.tokens), 8 << 10):  # as it grows with its turns
        index.extend(1, path, start + (8 << 10))
    blocks = saved(index, path)
    index.release(1)
    for block in reversed(blocks):
        name_of(block, by_range=by_range)
    for block in blocks:
        name_of(block, by_range=by_range)
    assert sum(hashed) == len(path.tokens)


lines = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda values: np.repeat(np.array(values, dtype=np.int32), 50)  # blocks end within these runs
)
paths = st.builds(Path, lines, st.sampled_from([TEAM, Scope("red"), Scope("team", adapters=b"a")]), st.just(0))


@given(st.lists(st.tuples(paths, st.integers(0, 310)), min_size=1, max_size=6), st.randoms(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_blocks_have_the_names_that_calls_look_for(found: list[tuple[Path, int]], random: Random, grows: bool) -> None:
    """However the conversations parted and grew, and whatever was named before."""
    index = PrefixIndex()
    for number, (of, num_public) in enumerate(found):
        path = Path(of.tokens, of.scope, num_public)
        ends = sorted({len(path.tokens), *(random.sample(range(1, len(path.tokens)), 3) if grows else ())})
        for before, end in pairwise((0, *ends)):
            index.share(number, path, min(end, max(before, index.match(path, end).num_held)))
            index.extend(number, path, end)
            state = Block(0, end, b"state")
            index.store(number, state, lambda block: True)
            assert name_of(state, by_range=False) == StateNames(path.tokens, path.scope, num_public).name(end)
        expected = block_names(path.tokens, path.scope, num_public)
        blocks = list(zip(blocks_of(path), expected, strict=True))
        random.shuffle(blocks)
        for block, name in blocks:
            index.store(number, block, lambda block: True)
            assert name_of(block) == name
        index.check()
