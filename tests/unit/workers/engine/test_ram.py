"""RAM as a store: what is too large for it costs nobody else their place."""

from __future__ import annotations

import numpy as np

from workers.engine.prefix import Block, Path, PrefixIndex
from workers.engine.ram import RamStore
from workers.engine.scope import Scope


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
