"""The journal of a process: on disk where that works, in memory where it does not, and taken over after its death."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from pathlib import Path

import pytest

from accounts.protocol.usage import CUT, UsageRecord, decode_record, encode_record
from gateway.usage.journal import MAX_HELD, OwnJournal
from gateway.usage.recovery import DeadJournal, adopt
from gateway.usage.running_calls import RunningCall

ROOM = 1 << 20


class Own:
    """A journal of this process, which can die."""

    def __init__(self, folder: Path, process: str = "p", max_bytes: int = ROOM) -> None:
        self.counts: Counter[str] = Counter()
        self.journal = OwnJournal(folder, process, max_bytes, lambda what: self.counts.update([what]))

    def begin(self, name: str) -> RunningCall:
        return self.journal.calls.open(encode_record(record(0, name)))

    def end(self, call: RunningCall, name: str) -> None:
        self.journal.add(encode_record(record(self.journal.last + 1, name)), call.serial)
        call.close()

    def call(self, name: str) -> None:
        self.end(self.begin(name), name)

    def die(self) -> None:
        self.journal.close()
        table = self.journal._table
        if table is not None:
            fcntl.flock(table, fcntl.LOCK_UN)


def record(number: int, name: str) -> UsageRecord:
    return UsageRecord(number=number, request_id=name, started_at=1000.0, ended_at=0.0, route="/v1", outcome="ok")


def price(used: UsageRecord) -> int:
    return 1000 * used.completion_tokens


def names(journal: OwnJournal | DeadJournal, after: int = 0) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    while records := journal.read(after, 100, ROOM):
        after += len(records)
        found += [(one.number, one.request_id) for one in map(decode_record, records)]
    return found


def adopted(folder: Path, own: str = "q") -> list[DeadJournal]:
    return adopt(folder, own, price)


def test_calls_of_a_dead_process_are_found_once(tmp_path: Path) -> None:
    own = Own(tmp_path)
    own.call("a")
    cut = own.begin("cut")
    cut.set_prompt(30, 20, 10)
    cut.set_completion(7)
    own.call("b")
    own.journal.beat()
    assert adopted(tmp_path) == [], "its process lives"
    own.die()
    (dead,) = adopted(tmp_path)
    assert adopted(tmp_path, "r") == [], "another process has it"
    assert names(dead) == [(1, "a"), (2, "b"), (3, "cut")]
    assert dead.num_cut == 1
    (last,) = map(decode_record, dead.read(2, 10, ROOM))
    assert (last.outcome, last.prompt_tokens, last.cached_tokens, last.media_tokens) == (CUT, 30, 20, 10)
    assert (last.completion_tokens, last.cost_nano) == (7, 7000)
    dead.commit(3)
    dead.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_successor_that_dies_as_well_leaves_the_same(tmp_path: Path) -> None:
    own = Own(tmp_path)
    own.call("a")
    for number in range(3):
        own.begin(f"cut {number}")
    own.die()
    (first,) = adopted(tmp_path)
    found = names(first)
    first.close()
    (second,) = adopted(tmp_path, "r")
    assert names(second) == found
    assert len(found) == 4
    assert second.num_cut == 0


def test_a_call_that_ended_just_before_the_death_counts_once(tmp_path: Path) -> None:
    """Its record is on disk, and its slot not yet free."""
    own = Own(tmp_path)
    call = own.begin("a")
    own.journal.add(encode_record(record(1, "a")), call.serial)
    own.die()
    (dead,) = adopted(tmp_path)
    assert names(dead) == [(1, "a")]


def test_numbers_are_not_given_twice_after_files_were_deleted(tmp_path: Path) -> None:
    own = Own(tmp_path)
    for name in "abc":
        own.call(name)
    own.journal.commit(3)
    own.begin("cut")
    own.die()
    (dead,) = adopted(tmp_path)
    assert (dead.last, dead.committed, names(dead, 3)) == (4, 3, [(4, "cut")])


def test_a_disk_that_can_not_be_used_holds_nothing_up(tmp_path: Path) -> None:
    """The folder can't be made: there is a file of that name."""
    (tmp_path / "usage").write_text("")
    own = Own(tmp_path / "usage")
    own.call("a")
    running = own.begin("b")
    assert names(own.journal) == [(1, "a")]
    assert own.counts == {"held": 1}
    (tmp_path / "usage").unlink()
    own.journal._retry_at = 0.0
    own.journal.beat()
    own.end(running, "b")
    assert names(own.journal) == [(1, "a"), (2, "b")]
    assert own.counts == {"held": 1, "kept": 1}
    own.begin("c")
    own.die()
    (dead,) = adopted(tmp_path / "usage")
    assert names(dead) == [(1, "a"), (2, "b"), (3, "c")]


def test_a_table_that_the_disk_does_not_take_any_more_is_made_anew(tmp_path: Path) -> None:
    """Its pages have no place: a store into one would end the process (SIGBUS)."""
    own, table = Own(tmp_path), tmp_path / "p.calls"
    own.call("a")
    running = own.begin("b")
    os.truncate(table, 0)
    running.set_completion(1)
    own.journal._retry_at = float("inf")
    own.journal.beat()
    own.end(running, "b")
    assert own.counts == {"kept": 1, "held": 1}
    assert adopted(tmp_path) == [], "its process lives, whatever became of the table"
    own.journal._retry_at = 0.0
    own.journal.beat()
    own.call("c")
    assert own.counts == {"kept": 2, "held": 1}
    own.begin("d").set_completion(7)
    own.die()
    (dead,) = adopted(tmp_path)
    assert names(dead) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, write = Own(tmp_path), os.write

    def refuse(fd: int, body: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    own.call("a")
    monkeypatch.setattr(os, "write", refuse)
    own.call("b")
    own.call("c")
    assert names(own.journal) == [(1, "a"), (2, "b"), (3, "c")]
    assert own.counts == {"kept": 1, "held": 2}
    own.journal.commit(2)
    monkeypatch.setattr(os, "write", write)
    own.call("d")
    assert names(own.journal, 2) == [(3, "c"), (4, "d")]
    own.journal._retry_at = 0.0
    own.call("e")
    assert names(own.journal, 2) == [(3, "c"), (4, "d"), (5, "e")]
    assert own.counts["kept"] == 2
    own.die()
    (dead,) = adopted(tmp_path)
    assert names(dead, 2) == [(3, "c"), (4, "d"), (5, "e")]


def test_no_more_is_held_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("")
    own = Own(tmp_path / "usage")
    for _ in range(MAX_HELD + 5):
        own.call("a")
    assert own.counts == {"held": MAX_HELD, "dropped": 5}
    assert own.journal.last == MAX_HELD


def test_a_full_journal_drops_records_and_numbers_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Own(tmp_path, max_bytes=10_000)
    for number in range(500):
        own.call(str(number))
    assert own.counts["dropped"] > 0
    assert own.counts["kept"] + own.counts["dropped"] == 500
    assert "80% of usage_journal_mib" in caplog.text
    assert caplog.text.count("records are dropped") == 1
    last = own.journal.last
    own.journal.commit(last)
    own.journal.beat()
    own.call("after")
    assert names(own.journal, last) == [(last + 1, "after")]


def test_journals_that_were_taken_over_take_of_the_room(tmp_path: Path) -> None:
    own = Own(tmp_path, max_bytes=10_000)
    own.journal.set_beside(9_900)
    for _ in range(10):
        own.call("a")
    assert 0 < own.counts["kept"] < 5
    own.journal.set_beside(0)
    own.call("a")
    assert names(own.journal)[-1] == (own.journal.last, "a")
    assert own.counts["dropped"] == 10 - own.counts["kept"] + 1


def test_an_unused_journal_leaves_nothing(tmp_path: Path) -> None:
    own = Own(tmp_path)
    own.call("a")
    own.journal.commit(1)
    own.journal.remove()
    assert list(tmp_path.iterdir()) == []
