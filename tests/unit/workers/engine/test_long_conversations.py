"""What the engine's thread does for one team's long conversation while others wait: without a model, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import pytest

from workers.engine.cache.cached_sequence import NOWHERE
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import MANY_PATHS, Block
from workers.engine.cache.prompt import BLOCK_TOKENS, Path, Scope
from workers.engine.cache.slots import READ_TOKENS, CopiedSlot, SlotContents, Work
from workers.engine.pace import MovePace, PrefillPace
from workers.engine.step.sequence import Sequence
from workers.llama.memory import CellPositions, Memory
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.requests import GenerateRequest

T = TypeVar("T")

TOKEN_BYTES = 10
SCRATCH = 3

Timed = Callable[[int], Callable[[], object]]


class SlowMemory:
    """Cells of nothing, whose copies take as long as they are told to."""

    def __init__(self) -> None:
        self.block_s = 0.0
        self.num_saved = 0
        self._num_shared = 0

    def share(self, source: int, target: int, start: int, end: int) -> None:
        self._num_shared = end - start

    def save(self, sequence: int) -> bytes:
        time.sleep(self.block_s)
        self.num_saved += 1
        return bytes(self._num_shared * TOKEN_BYTES)

    def lay_out(self, sequence: int, positions: CellPositions | None) -> None: ...

    def num_cells(self, sequence: int, start: int, end: int) -> int:
        return end - start

    def holds_from(self, sequence: int, cell: int) -> bool:
        return True

    def load(self, sequence: int, state: bytes, positions: CellPositions | None = None) -> None: ...

    def remove(self, sequence: int) -> None: ...


class Disk:
    """Has everything."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def look_up(self, path: Path, known: int, limit: int, on_blocks: Callable[[list[Block]], None]) -> bool:
        self.asked.append((known, limit))
        state = bytes(BLOCK_TOKENS * TOKEN_BYTES)
        on_blocks([Block(start, start + BLOCK_TOKENS, state) for start in range(known, limit, BLOCK_TOKENS)])
        return True


def path_of(num_tokens: int, first: int = 0) -> Path:
    return Path(np.arange(first, first + num_tokens, dtype=np.int32), Scope("team"))


def cache_of(memory: SlowMemory, ram_bytes: int = 1 << 30) -> PrefixCache:
    pace = MovePace(PrefillPace(32, 512))
    return PrefixCache(
        cast(Memory, memory), kv_tokens=1 << 20, num_sequences=SCRATCH + 1, ram_bytes=ram_bytes, pace=pace
    )


class Call(SimpleNamespace):
    num_cells: int

    @property
    def num_whole(self) -> int:
        return self.num_cells


def call(path: Path) -> Sequence:
    """A conversation that is at its end."""
    one = Call(id=NOWHERE, num_cells=0, num_known=len(path.tokens) + 1, scope=path.scope, restores=[])
    one.cache_prompt, one.num_public = True, 0
    one.request = SimpleNamespace(asked=GenerateRequest(), label="")
    one.can_be_kept, one.shifted, one.slot, one.num_prompt, one.num_predicted = True, False, 0, len(path.tokens), 0
    one.is_full, one.path = False, lambda: path
    one.positions, one.trim, one.is_within_picture = None, lambda match: match, False
    return cast(Sequence, one)


def ended(cache: PrefixCache, path: Path) -> Sequence:
    """Its cells are idle."""
    one = call(path)
    cache.enter(one)
    one.restores.clear()
    one.num_cells = len(path.tokens)
    cache.leave(one, keep=True)
    return one


def known(cache: PrefixCache, path: Path) -> int:
    return cache.index.match(path, len(path.tokens)).num_known


def saved(index: PrefixIndex, num_tokens: int) -> Path:
    path = path_of(num_tokens)
    index.extend(1, path, num_tokens)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        index.store(1, Block(start, start + BLOCK_TOKENS, b""))
    return path


def asking_what_to_save(num_tokens: int) -> Callable[[], object]:
    index = PrefixIndex()
    saved(index, num_tokens)
    return lambda: index.unsaved(1, BLOCK_TOKENS)


def looking_up(num_tokens: int) -> Callable[[], object]:
    index = PrefixIndex()
    path = saved(index, num_tokens)
    index.release(1)
    return lambda: index.match(path, num_tokens)


def saving(num_tokens: int) -> Callable[[], object]:
    return lambda: saved(PrefixIndex(), num_tokens)


def copying(num_tokens: int) -> Callable[[], object]:
    """A slot's conversation that lies in RAM."""
    path, cache = path_of(num_tokens), cache_of(SlowMemory())
    for start in range(0, num_tokens, BLOCK_TOKENS):
        cache.take_in(path, Block(start, start + BLOCK_TOKENS, b"state"))
    return lambda: copied(cache, path)


def copied(cache: PrefixCache, path: Path, max_bytes: int = 1 << 30, disk: Disk | None = None) -> CopiedSlot:
    book = SlotContents(cache, [], disk, num_slots=1, n_ctx=len(path.tokens))
    one = call(path)
    one.num_cells = len(path.tokens)
    book.ended(one, keep=True)
    found = done(book.copied(0, "team", "", max_bytes))
    assert found is not None
    return found


def done(work: Work[T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


@pytest.mark.parametrize("what", [asking_what_to_save, looking_up, saving, copying])
def test_eight_times_the_tokens_take_about_eight_times_as_long(what: Timed) -> None:
    short, long = what(16 << 10), what(128 << 10)
    assert quickest(long) < 28 * quickest(short), "64 times is what the square of the tokens takes"


def quickest(does: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        started = time.process_time()
        does()
        times.append(time.process_time() - started)
    return min(times)


@pytest.mark.usefixtures("unhurried")
def test_a_copy_goes_on_from_ram_where_its_cells_have_gone_meanwhile() -> None:
    """Another conversation has their number then."""
    memory, path = SlowMemory(), path_of(5 * BLOCK_TOKENS)
    cache = cache_of(memory)
    ended(cache, path)
    blocks = cache.copies(path, 0, len(path.tokens))
    assert next(blocks).end == BLOCK_TOKENS
    assert cache.make_room(cache.kv_tokens)
    ended(cache, path_of(5 * BLOCK_TOKENS, first=1000))
    memory.num_saved = 0
    assert [block.end for block in blocks] == [n * BLOCK_TOKENS for n in (2, 3, 4, 5)]
    assert not memory.num_saved


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give moves all the time they take: on a busy machine the usual 20 ms are over after a few blocks."""
    monkeypatch.setattr("workers.engine.cache.prefix_cache.MOVE_S", 60.0)


@pytest.mark.serial
def test_making_room_saves_for_a_moment_and_from_the_beginning() -> None:
    memory, path = SlowMemory(), path_of(512 * BLOCK_TOKENS)
    cache = cache_of(memory)
    ended(cache, path)
    memory.block_s = 0.002
    started = time.perf_counter()
    assert cache.make_room(cache.kv_tokens)
    assert time.perf_counter() - started < 0.5, "all of it took a second"
    assert BLOCK_TOKENS <= known(cache, path) == memory.num_saved * BLOCK_TOKENS <= 12 * BLOCK_TOKENS
    cache.index.check()
    cache.ram.check()


def test_an_id_is_made_free_as_quickly() -> None:
    memory = SlowMemory()
    cache = cache_of(memory)
    for number in range(SCRATCH):
        ended(cache, path_of(64 * BLOCK_TOKENS, first=number * 10_000))
    memory.block_s = 0.005
    cache.enter(call(path_of(BLOCK_TOKENS, first=90_000)))
    assert 1 <= memory.num_saved <= 5


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("by", ["need", "age"])
def test_of_a_prefix_larger_than_ram_the_beginning_is_saved(by: str) -> None:
    memory, path, other = SlowMemory(), path_of(100 * BLOCK_TOKENS), path_of(50 * BLOCK_TOKENS, first=10_000)
    cache = cache_of(memory, ram_bytes=60 * BLOCK_TOKENS * TOKEN_BYTES)
    for one in (other, path):
        ended(cache, one)
        for step in range(1000, 1200):
            if by == "age" and cache.num_idle:
                cache.tidy(step, 0.001)
        assert by == "need" or not cache.num_idle
        cache.make_room(cache.kv_tokens)
    assert memory.num_saved <= 50 + 60, "nothing is copied to be dropped"
    assert known(cache, path) >= 50 * BLOCK_TOKENS
    assert known(cache, path) + known(cache, other) == cache.ram.num_bytes // TOKEN_BYTES, "nothing without its front"


@pytest.mark.usefixtures("unhurried")
def test_what_begins_alike_leaves_room_for_each_other() -> None:
    """All begin with the model's own token, so their first blocks hang together."""
    cache = cache_of(SlowMemory(), ram_bytes=20 * BLOCK_TOKENS * TOKEN_BYTES)
    for number in range(100, 140):
        path = Path(np.asarray([1, *range(number, number + 2 * BLOCK_TOKENS)], np.int32), Scope("team"))
        ended(cache, path)
        cache.make_room(cache.kv_tokens)
        assert known(cache, path) == len(path.tokens)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("where", ["cells", "RAM"])
def test_no_more_of_a_slot_is_copied_than_may_be_saved(where: str) -> None:
    memory, path = SlowMemory(), path_of(100 * BLOCK_TOKENS)
    cache, num_bytes = cache_of(memory), 100 * BLOCK_TOKENS * TOKEN_BYTES
    ended(cache, path)
    if where == "RAM":
        cache.make_room(cache.kv_tokens)
    assert len(copied(cache, path, num_bytes).conversation.blocks) == 100
    memory.num_saved = 0
    with pytest.raises(CallFailed, match="takes more than the 6,400 bytes that are left") as caught:
        copied(cache, path, num_bytes // 10)
    assert (caught.value.failure.code, caught.value.failure.param) == (FailureCode.STORAGE_FULL, "filename")
    assert memory.num_saved == (11 if where == "cells" else 0)


def test_no_more_is_read_from_disk_than_may_be_saved_but_for_a_part() -> None:
    path, disk = path_of(100 * BLOCK_TOKENS), Disk()
    assert len(copied(cache_of(SlowMemory()), path, disk=disk).conversation.blocks) == 100
    disk.asked.clear()
    with pytest.raises(CallFailed, match="that are left"):
        copied(cache_of(SlowMemory()), path, READ_TOKENS * TOKEN_BYTES, disk)
    assert disk.asked == [(0, READ_TOKENS), (READ_TOKENS, 2 * READ_TOKENS)]


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("order", [1, -1])
def test_saved_forks_of_a_conversation_are_bounded(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would make every look along the conversation longer. Where many part at one place, all are saved."""
    monkeypatch.setattr("workers.engine.cache.prefix_tree.MAX_FORKS", 20)
    cache, path = cache_of(SlowMemory()), path_of(10 * BLOCK_TOKENS)
    ended(cache, path)
    for length in range(7, 10 * BLOCK_TOKENS, 7)[::order]:
        branch(cache, path, length, 100_000)
    assert cache.index.root.children[path.scope, 0].num_forks <= 20 + SCRATCH
    for number in range(40):
        branch(cache, path, 3, 200_000 + number)
    assert cache.make_room(cache.kv_tokens)
    assert known(cache, path) == len(path.tokens)
    assert sum(block.end == 4 for block in cache.ram.blocks) >= 40 - MANY_PATHS
    cache.index.check()
    cache.ram.check()


def branch(cache: PrefixCache, path: Path, length: int, last: int) -> None:
    """A conversation that begins like the path and ends with a token of its own."""
    ended(cache, Path(np.append(path.tokens[:length], np.int32(last)), path.scope))
