"""The report over the true prefix index, with a cache and a disk as simple as can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from workers.engine.cache.prefix_index import PrefixIndex
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.prompt import Path, Scope
from workers.engine.cache.report import DISK_S, PASS_S, CacheReport, Found

SCOPE = Scope("t")


@dataclass
class Cache:
    index: PrefixIndex = field(default_factory=PrefixIndex)
    needs_stops: bool = False


@dataclass
class Disk:
    num_known_there: int = 0
    num_asked: int = 0

    def num_known(self, path: Path, known: int, limit: int) -> int:
        self.num_asked += 1
        return max(known, self.num_known_there)


class Ended:
    """As much of a sequence as the report looks at."""

    shifted = False

    def __init__(self, key: int, length: int) -> None:
        self.key = key
        self.num_public = 0
        self._path = Path(np.arange(key * 10_000, key * 10_000 + length, dtype=np.int32), SCOPE)

    def path(self) -> Path:
        return self._path


class Bench:
    def __init__(self, *, needs_stops: bool = False, disk: Disk | None = None) -> None:
        self.now = 100.0
        self.cache = Cache(needs_stops=needs_stops)
        self.index = self.cache.index
        self.report = CacheReport(cast(Any, self.cache), cast(Any, disk), lambda: self.now)

    def end(self, key: int, length: int = 300) -> Path:
        """A call whose cells stay under its key."""
        ended = Ended(key, length)
        self.index.extend(key, ended.path(), length - 1)
        self.report.ended(cast(Any, ended))
        return ended.path()

    def found(self, *, at_rest: bool = False) -> list[Found]:
        while self.report.look(at_rest=at_rest):
            pass
        return self.report.take()


def test_a_conversation_is_looked_up_at_its_end_and_when_something_was_lost() -> None:
    bench = Bench()
    bench.end(1)
    bench.end(2)
    assert bench.found() == [Found(2, 299), Found(1, 299)]
    bench.now += 10
    assert bench.found() == []
    bench.index.release(1)
    assert bench.found() == [Found(1, 0)]
    bench.now += 10
    bench.index.release(2)
    assert bench.found() == [Found(2, 0)]
    assert bench.found(at_rest=True) == []


def test_it_is_not_asked_more_often_than_every_second_while_calls_run() -> None:
    bench = Bench()
    bench.end(1)
    bench.end(2)
    assert len(bench.found()) == 2
    bench.now += 2 * PASS_S
    bench.index.release(1)
    assert bench.found() == [Found(1, 0)]
    bench.index.release(2)
    assert bench.found() == []
    bench.now += PASS_S / 2
    assert bench.found() == []
    assert bench.found(at_rest=True) == [Found(2, 0)]


def test_what_was_saved_counts_and_what_was_dropped_does_not() -> None:
    bench = Bench()
    path = bench.end(1)
    blocks = [Block(0, 128, b"a"), Block(128, 256, b"b")]
    for block in blocks:
        bench.index.store(1, block)
    bench.index.release(1)
    assert bench.found() == [Found(1, 256)]
    bench.now += 10
    bench.index.drop(blocks[1])
    assert bench.found() == [Found(1, 128)]
    assert bench.index.match(path, 300).num_known == 128


def test_only_so_many_are_looked_up_at_once() -> None:
    bench = Bench()
    for key in range(1, 20):
        bench.end(key)
    assert bench.report.look(0.0)
    assert len(bench.report.take()) == 1
    assert len(bench.found()) == 18


def test_memory_with_stops_tells_them() -> None:
    bench = Bench(needs_stops=True)
    bench.end(1)
    bench.index.mark(1, 120, Block(120, 120, b"c"))
    bench.index.mark(1, 299, Block(299, 299, b"c"))
    assert bench.found() == [Found(1, 299, (120, 299))]
    bench.end(2)
    assert bench.found() == [Found(2, 0, ())]


def test_the_disk_is_asked_for_what_memory_has_not_and_not_again_too_soon() -> None:
    disk = Disk(num_known_there=192)
    bench = Bench(disk=disk)
    bench.end(1)
    assert bench.found() == [Found(1, 299)]
    assert disk.num_asked == 0
    bench.now += 10
    bench.index.release(1)
    assert bench.found() == [Found(1, 192)]
    for _ in range(3):
        bench.now += 2 * PASS_S
        bench.index.num_losses += 1
        assert bench.found() == []
    assert disk.num_asked == 1
    disk.num_known_there = 64
    bench.now += 2 * DISK_S
    assert Found(1, 64) in bench.found()


def test_those_that_nobody_wants_to_know_of_are_forgotten() -> None:
    bench = Bench()
    bench.end(1)
    bench.found()
    bench.report.forget([1, 77])
    bench.now += 10
    bench.index.release(1)
    assert bench.found() == []


def test_the_oldest_are_forgotten_when_all_together_have_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of each are kept, whatever of them is cached."""
    monkeypatch.setattr("workers.engine.cache.report.MAX_TOKENS", 1000)
    bench = Bench()
    for key in (1, 2, 3):
        bench.end(key)
    assert [found.num_known for found in bench.found()] == [299, 299, 299]
    bench.end(4, length=600)
    assert bench.found() == [Found(1, 0), Found(2, 0), Found(4, 599)]
    bench.report.forget([4])
    for key in (5, 6):
        bench.end(key)
    bench.end(5, length=400)
    assert bench.found() == [Found(5, 399), Found(6, 299)], "once each, and their tokens count once"
    bench.end(7, length=2)
    assert bench.found() == [Found(3, 0), Found(7, 1)]
