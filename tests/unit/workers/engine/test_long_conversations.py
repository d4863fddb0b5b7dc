"""What the engine's thread does for one team's long conversation while others wait: without a model, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import pytest

from workers.engine.cache import PrefixCache
from workers.engine.disk_names import BLOCK_TOKENS
from workers.engine.pace import MovePace, PrefillPace
from workers.engine.prefix import Block, Path, PrefixIndex
from workers.engine.scope import Scope
from workers.engine.sequence import NOWHERE, Sequence
from workers.engine.slots import CopiedSlot, SlotBook, Work
from workers.llama.memory import Memory

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

    def load(self, sequence: int, state: bytes) -> None: ...

    def remove(self, sequence: int) -> None: ...


def path_of(num_tokens: int, first: int = 0) -> Path:
    return Path(np.arange(first, first + num_tokens, dtype=np.int32), Scope("team"))


def cache_of(memory: SlowMemory, ram_bytes: int = 1 << 30) -> PrefixCache:
    pace = MovePace(PrefillPace(32, 512))
    return PrefixCache(
        cast(Memory, memory), kv_tokens=1 << 20, num_sequences=SCRATCH + 1, ram_bytes=ram_bytes, pace=pace
    )


def call(path: Path) -> Sequence:
    """A conversation that is at its end."""
    one = SimpleNamespace(id=NOWHERE, num_cells=0, num_known=len(path.tokens) + 1, scope=path.scope, restores=[])
    one.request = SimpleNamespace(cache_prompt=True, num_public=0, label="")
    one.can_be_kept, one.shifted, one.slot, one.num_prompt, one.num_predicted = True, False, 0, len(path.tokens), 0
    one.path = lambda: path
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


def is_saved(cache: PrefixCache, path: Path) -> bool:
    return cache.ram.num_bytes == len(path.tokens) * TOKEN_BYTES


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


def copied(cache: PrefixCache, path: Path) -> CopiedSlot:
    book = SlotBook(cache, SimpleNamespace(running=[]), None, num_slots=1, n_ctx=len(path.tokens))
    one = call(path)
    one.num_cells = len(path.tokens)
    book.ended(one, keep=True)
    found = done(book.copied(0, "team", ""))
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
