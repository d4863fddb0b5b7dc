"""What blocks are called that leave RAM for the disk, and what finding that out takes; without files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.cache import prompt
from workers.engine.cache.cached_sequence import Restore
from workers.engine.cache.checkpoints import CheckpointCache
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import BLOCK_TOKENS, BlockName, Path, Scope, StateNames, block_names
from workers.engine.disk.link import MAX_TAKEN_IN, DiskLink
from workers.engine.disk.tier import DiskTier
from workers.engine.pace import MovePace, PrefillPace
from workers.engine.step import sequence
from workers.llama.memory import CellPositions, Memory
from workers.llama.native import StateUnusable

TEAM = Scope("team")


class Listed:
    """Takes what a disk tier would write."""

    def __init__(self) -> None:
        self.names: list[BlockName] = []

    def put(self, name: BlockName, state: bytes) -> bool:
        self.names.append(name)
        return True


STATE = b"state"


class Full(Listed):
    """Has everything, and reads it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read: list[int] = []

    def num_fitting(self, names: Sequence[BlockName], max_bytes: int) -> int:
        return min(len(names), max_bytes // len(STATE))

    def num_known(self, names: Sequence[BlockName]) -> int:
        return len(names)

    def read_s(self, names: Sequence[BlockName]) -> float:
        return 0.0

    def fetch(self, names: Sequence[BlockName], on_done: Callable[[list[bytes]], None]) -> bool:
        self.num_read.append(len(names))
        on_done([STATE] * len(names))
        return True


def fetching(
    path: Path, cache: PrefixCache, full: Full | None = None
) -> tuple[sequence.Sequence, list[Callable[[], None]]]:
    """Return a call whose tokens all lie on disk, and what is posted for it."""
    posted: list[Callable[[], None]] = []
    link = DiskLink(cast(DiskTier, full or Full()), MovePace(PrefillPace(32, 512)), by_range=True, post=posted.append)
    one = SimpleNamespace(fetching=False, fetched=False, shifted=False, num_fetched=0, num_known=len(path.tokens) + 1)
    one.cache_prompt, one.path = True, lambda: path
    call = cast(sequence.Sequence, one)
    assert not link.may_enter(call, cache)
    return call, posted


def cache_of(ram_bytes: int) -> PrefixCache:
    pace = MovePace(PrefillPace(32, 512))
    memory = cast(Memory, SimpleNamespace())
    cache = PrefixCache(memory, kv_tokens=1 << 20, num_sequences=2, ram_bytes=ram_bytes, pace=pace)
    cache.lookup = lambda call: cache.index.match(call.path(), len(call.path().tokens))  # type: ignore[assignment, method-assign]
    return cache


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
    linked = prompt._linked

    def counted(data: bytes | memoryview, key: bytes) -> bytes:
        sizes.append(len(data) // 4)
        return linked(data, key)

    monkeypatch.setattr(prompt, "_linked", counted)
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


def test_a_long_conversation_is_taken_in_over_several_steps() -> None:
    path, cache = Path(np.arange(128 << 10, dtype=np.int32), TEAM), cache_of(1 << 30)
    call, posted = fetching(path, cache)
    num_steps = 0
    while posted:
        assert call.fetching, "it waits until all is there"
        before, acts, num_steps = cache.ram.num_blocks, posted[:], num_steps + 1
        posted.clear()
        for act in acts:
            act()
        assert cache.ram.num_blocks - before <= MAX_TAKEN_IN
    assert (call.fetching, num_steps, call.num_fetched) == (False, 2048 // MAX_TAKEN_IN, len(path.tokens))
    assert cache.index.match(path, len(path.tokens)).num_known == len(path.tokens)
    assert [len(node.tokens) for node in cache.index.root.children.values()] == [len(path.tokens)], (
        "one run, not one each"
    )


def test_no_more_is_read_than_ram_has_room_for_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.disk.link.FETCH_BYTES", 10 * len(STATE))
    path, cache, full = Path(np.arange(64 * BLOCK_TOKENS, dtype=np.int32), TEAM), cache_of(32 * len(STATE)), Full()
    call, posted = fetching(path, cache, full)
    while posted:
        posted.pop(0)()
    assert full.num_read == [10, 10, 8]
    assert (call.fetching, cache.index.match(path, len(path.tokens)).num_known) == (False, 28 * BLOCK_TOKENS)


def test_what_ram_has_of_a_prefix_counts_and_stays() -> None:
    path, cache, full = Path(np.arange(64 * BLOCK_TOKENS, dtype=np.int32), TEAM), cache_of(32 * len(STATE)), Full()
    for block in blocks_of(path)[:20]:
        cache.take_in(path, block)
    _, posted = fetching(path, cache, full)
    while posted:
        posted.pop(0)()
    assert full.num_read == [8]
    assert cache.index.match(path, len(path.tokens)).num_known == 28 * BLOCK_TOKENS


@pytest.mark.parametrize("kind", [PrefixCache, CheckpointCache])
def test_the_file_of_what_llama_cpp_could_not_restore_is_removed(kind: type[PrefixCache]) -> None:
    """It would be read again for each call that begins with it: what is computed anew is not written over it."""

    def refuse(sequence: int, state: bytes, positions: CellPositions | None = None) -> None:
        raise StateUnusable("no")

    dropped: list[BlockName] = []
    tier = SimpleNamespace(discard=dropped.append, has=lambda name: True)
    by_range = kind is PrefixCache
    link = DiskLink(cast(DiskTier, tier), MovePace(PrefillPace(32, 512)), by_range, post=lambda act: act())
    memory = cast(Memory, SimpleNamespace(load=refuse))
    pace = MovePace(PrefillPace(32, 512))
    cache = kind(memory, kv_tokens=1 << 20, num_sequences=2, ram_bytes=1 << 20, pace=pace, on_unusable=link.unusable)
    path = Path(np.arange(BLOCK_TOKENS, dtype=np.int32), TEAM)
    [block] = saved(cache.index, path)
    cache.ram.add(block, [])
    restores = deque([Restore(block, 0, BLOCK_TOKENS)])
    call = SimpleNamespace(restores=restores, num_cells=0, id=0, path=lambda: path, positions=None)
    call.is_within_picture = False
    cache.restore(cast(sequence.Sequence, call))
    assert [name.end for name in dropped] == [BLOCK_TOKENS]
    assert not cache.ram.blocks
    link.unusable(block)
    assert len(dropped) == 1, "what the index has forgotten has no name"


def test_nothing_more_is_read_for_a_call_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.disk.link.FETCH_BYTES", 10 * len(STATE))
    path, cache, full = Path(np.arange(64 * BLOCK_TOKENS, dtype=np.int32), TEAM), cache_of(1 << 30), Full()
    call, posted = fetching(path, cache, full)
    call.fetching = False
    while posted:
        posted.pop(0)()
    assert full.num_read == [10]


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
        index.release(random.randint(0, number))
        for block, name in blocks:
            assert name_of(block) == name, "also where runs were joined"
        index.check()
