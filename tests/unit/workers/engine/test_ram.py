"""RAM as a store: what is too large for it costs nobody else their place."""

from __future__ import annotations

import numpy as np
import pytest

from workers.engine.cache import ram as ram_module
from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import Path, Scope
from workers.engine.cache.ram import RamStore


def test_a_block_that_is_larger_than_all_ram_drives_nobody_out() -> None:
    index = PrefixIndex()
    ram = RamStore(index, 1_000)
    for number in range(4):
        path = Path(np.asarray([number, *range(63)], np.int32), Scope("team"))
        block = Block(0, 64, bytes(200))
        ram.add(block, index.put(path, block))
    huge = Block(0, 64, bytes(2_000))
    ram.add(huge, index.put(Path(np.asarray([9, *range(63)], np.int32), Scope("team")), huge))
    assert ram.num_blocks == 4


def test_no_more_is_dropped_at_once_than_takes_an_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_module, "MAX_DROP_BYTES", 400, raising=False)
    dropped: list[Block] = []
    index = PrefixIndex()
    ram = RamStore(index, 20_000, dropped.append)
    blocks = []
    for number in range(150):
        path = Path(np.asarray([number, *range(63)], np.int32), Scope("team"))
        block = Block(0, 64, bytes(200))
        blocks.append(block)
        num_before = len(dropped)
        ram.add(block, index.put(path, block))
        assert len(dropped) - num_before <= 3
        ram.touch(blocks[0])
        ram.check()
    assert dropped == blocks[1 : len(dropped) + 1], "the oldest first, but for what is in use"
    assert ram.num_bytes >= ram.low_water


def test_of_one_age_the_end_of_a_prefix_goes_first() -> None:
    dropped: list[Block] = []
    index = PrefixIndex()
    ram = RamStore(index, 1_000, dropped.append)
    path = Path(np.asarray(range(320), np.int32), Scope("team"))
    blocks = [Block(start, start + 64, bytes(200)) for start in range(0, 320, 64)]
    for block in blocks:
        ram.add(block, index.put(path, block))
    ram.touch(*blocks)
    other = Block(0, 64, bytes(200))
    ram.add(other, index.put(Path(np.asarray([999, *range(63)], np.int32), Scope("team")), other))
    assert [block.start for block in dropped] == [256, 192]
    ram.check()
