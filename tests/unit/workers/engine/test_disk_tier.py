from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_disk import filled, needs_disks, read_only, small_disk
from tests.unit.workers.engine.disk_support import (
    FINGERPRINT,
    KEYS,
    STATE_BYTES,
    TEAM,
    fetched,
    files,
    names,
    states,
    store,
    tier,
    until,
)
from workers.engine.cache.prompt import BlockName, Scope, StateNames
from workers.engine.disk.folder import CacheFolder, CacheFolderUnusable
from workers.engine.disk.sealed import HEADER, SEAL_BYTES, version_folder
from workers.engine.disk.tier import DiskTier, Stop

FILE_BYTES = STATE_BYTES + HEADER.size + SEAL_BYTES


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    wanted, contents = names(5), states(5)
    with tier(tmp_path / "cache") as one:
        assert not one.has(wanted[0])
        store(one, wanted, contents)
        assert one.num_known(wanted) == 5
        assert one.stats.num_bytes == 5 * FILE_BYTES
    with tier(tmp_path / "cache") as one:
        assert one.num_known(wanted) == 5
        assert one.num_known(names(5, seed=1)) == 0
        assert fetched(one, wanted) == contents
        assert fetched(one, wanted[2:4]) == contents[2:4]
        assert one.stats.read_bytes_per_s > 0
        assert one.stats.num_read == 7
        assert one.stats.write_bytes_per_s == 0


@needs_disks
def test_a_folder_that_is_only_read_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, contents = names(3), states(3)
    with small_disk(tmp_path / "disk", 4) as disk:
        with tier(disk / "cache") as one:
            store(one, wanted[:2], contents[:2])
        with read_only(disk), tier(disk / "cache") as one:
            assert fetched(one, wanted[:2]) == contents[:2]
            assert one.num_known(wanted) == 2
            one.put(wanted[2], contents[2])
            until(lambda: "can't be written: Read-only file system" in caplog.text)
        assert "takes no files now (Read-only file system)" in caplog.text
        assert "can't be read" not in caplog.text


@needs_disks
@pytest.mark.parametrize("trouble", [filled, read_only])
def test_a_folder_that_is_missing_on_a_disk_in_trouble_is_told_with_the_remedy(
    tmp_path: Path, trouble: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """It was said to be another user's. A tmpfs that is full still takes folders."""
    with small_disk(tmp_path / "disk", 4) as disk, trouble(disk):
        if trouble is filled:
            with tier(disk / "cache") as one:
                assert one.ready
            return
        told = r"disk/cache: the disk takes no new folder now \(Read-only file system\); give it room and let it be"
        with pytest.raises(CacheFolderUnusable, match=told):
            CacheFolder(disk / "cache")


@needs_disks
def test_a_folder_that_is_too_full_and_lets_no_file_go_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that could not be removed were forgotten and counted as evicted, with each look at the folder."""
    wanted, contents = names(6), states(6)
    with small_disk(tmp_path / "disk", 4) as disk:
        with tier(disk / "cache") as one:
            store(one, wanted[:4], contents[:4])
        with read_only(disk), tier(disk / "cache", max_bytes=2 * FILE_BYTES) as one:
            one.put(wanted[4], contents[4])
            until(lambda: "is too full, and keeps its files: Read-only file system" in caplog.text)
            one.put(wanted[5], contents[5])
            until(lambda: one.stats.num_failed == 2)
            assert fetched(one, wanted[:4]) == contents[:4]
            assert one.num_known(wanted[:4]) == 4
            assert one.stats.num_evicted == 0
        with tier(disk / "cache", max_bytes=2 * FILE_BYTES) as one:
            store(one, wanted[5:], contents[5:])
            assert one.stats.num_evicted >= 3


def test_what_lies_where_and_who_may_read_it(tmp_path: Path) -> None:
    wanted = names(3)
    with tier(tmp_path / "cache") as one:
        store(one, wanted, states(3))
    for name in wanted:
        file = KEYS.file_name(FINGERPRINT, name.digest)
        path = tmp_path / "cache" / version_folder(FINGERPRINT) / KEYS.tenant_folder("blue") / file[:2] / file
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for folder in (path.parent, path.parent.parent, path.parent.parent.parent, tmp_path / "cache"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(files(tmp_path / "cache")) == 3


def test_fetch_ends_at_the_first_gap(tmp_path: Path) -> None:
    wanted, contents = names(4), states(4)
    with tier(tmp_path / "cache") as one:
        store(one, [wanted[0], wanted[1], wanted[3]], [contents[0], contents[1], contents[3]])
        assert one.num_known(wanted) == 2
        assert fetched(one, wanted) == contents[:2]
        assert fetched(one, wanted[2:]) == []
        assert fetched(one, []) == []


def test_what_is_queued_is_found(tmp_path: Path) -> None:
    go = threading.Event()

    def identify(stop: Stop) -> bytes:
        go.wait(10)
        return FINGERPRINT

    wanted, contents = names(3), states(3)
    with tier(tmp_path / "cache", identify=identify) as one:
        assert all(one.put(name, state) for name, state in zip(wanted, contents, strict=True))
        assert one.num_known(wanted) == 3
        assert not one.fetch(wanted, lambda blocks: None)
        assert not one.flush(0.01)
        assert one.stats.queued_bytes == 3 * STATE_BYTES
        go.set()
        until(lambda: one.ready)
        assert fetched(one, wanted) == contents
        assert one.flush(10)
        assert one.stats.queued_bytes == 0
        assert one.stats.num_written == 3


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    go = threading.Event()

    def identify(stop: Stop) -> bytes:
        go.wait(10)
        return FINGERPRINT

    wanted, contents = names(6), states(6)
    with tier(tmp_path / "cache", identify=identify, queue_bytes=4 * STATE_BYTES) as one:
        started = time.perf_counter()
        taken = [one.put(name, state) for name, state in zip(wanted, contents, strict=True)]
        assert time.perf_counter() - started < 1
        assert taken == [True] * 4 + [False] * 2
        assert one.put(wanted[0], contents[0])
        assert one.stats.num_dropped == 2
        assert one.stats.queued_bytes == 4 * STATE_BYTES
        go.set()
        until(lambda: one.ready)
        assert one.flush(10)
        assert one.put(wanted[4], contents[4])


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    wanted, contents = names(1), states(2)
    with tier(tmp_path / "cache") as one:
        store(one, wanted, contents[:1])
        store(one, wanted, contents[1:])
        assert fetched(one, wanted) == contents[:1]
        assert one.stats.num_written == 1


def test_without_a_fingerprint_nothing_is_kept(tmp_path: Path) -> None:
    with tier(tmp_path / "cache", identify=lambda stop: None) as one:
        one.put(names(1)[0], b"state")
        until(lambda: one.closed)
        assert one.put(names(1)[0], b"state"), "there is nothing to wait for"
        assert one.stats.num_dropped == 2
        assert one.stats.queued_bytes == 0
        assert not one.flush(1)
        assert not one.has(names(1)[0])
    assert files(tmp_path / "cache") == []


def test_a_failing_fingerprint_leaves_the_worker_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def identify(stop: Stop) -> bytes:
        raise RuntimeError("the model changed")

    with tier(tmp_path / "cache", identify=identify) as one:
        until(lambda: one.closed)
        assert not one.fetch(names(1), lambda blocks: None)
    assert "the disk tier stopped" in caplog.text


def test_close_stops_a_long_hash(tmp_path: Path) -> None:
    def identify(stop: Stop) -> bytes | None:
        while not stop():
            time.sleep(0.001)
        return None

    started = time.monotonic()
    with tier(tmp_path / "cache", identify=identify):
        pass
    assert time.monotonic() - started < 5


def test_every_fetch_that_was_taken_is_answered_once(tmp_path: Path) -> None:
    wanted = names(40)
    answers: list[int] = []
    with tier(tmp_path / "cache") as one:
        store(one, wanted, states(40))
        taken = sum(one.fetch(wanted, lambda blocks: answers.append(len(blocks))) for _ in range(50))
    assert len(answers) == taken == 50
    assert not one.fetch(wanted, lambda blocks: answers.append(0))


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "oversized", "renamed", "foreign", "link", "folder"])
def test_what_can_not_be_trusted_is_dropped_with_one_line(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    wanted, contents = names(3), states(3)
    with tier(cache) as one:
        store(one, wanted, contents)
        path = _path(cache, wanted[1])
        _spoil(kind, path, _path(cache, wanted[0]), tmp_path)
        with caplog.at_level(logging.WARNING):
            assert fetched(one, wanted) == contents[:1]
        lines = [record for record in caplog.records if path.name in record.getMessage()]
        assert len(lines) == 1
        assert not one.has(wanted[1])
        if kind != "folder":
            assert one.stats.num_refused == 1
            assert not path.exists()
            assert not path.is_symlink()
            assert one.put(wanted[1], contents[1])
            assert one.flush(10)
            assert fetched(one, wanted) == contents
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes()


def _path(cache: Path, name: BlockName) -> Path:
    file = KEYS.file_name(FINGERPRINT, name.digest)
    return cache / version_folder(FINGERPRINT) / KEYS.tenant_folder(name.tenant) / file[:2] / file


def _spoil(kind: str, path: Path, other: Path, outside: Path) -> None:
    whole = path.read_bytes()
    if kind == "flipped":
        path.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    elif kind == "cut":
        path.write_bytes(whole[:2000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "oversized":
        os.truncate(path, 1 << 40)
    elif kind == "renamed":
        shutil.copy(other, path)
    elif kind == "foreign":
        path.write_bytes(b"not ours at all" * 100)
    elif kind == "link":
        path.rename(outside / "elsewhere")
        path.symlink_to(outside / "elsewhere")
    else:
        path.unlink()
        path.mkdir()


def test_another_secret_finds_nothing_and_harms_nothing(tmp_path: Path) -> None:
    wanted, contents = names(3), states(3)
    with tier(tmp_path / "cache") as one:
        store(one, wanted, contents)
    with tier(tmp_path / "cache", secret="other") as other:
        assert fetched(other, wanted) == []
        assert other.stats.num_refused == 0
        assert other.stats.num_bytes == 3 * FILE_BYTES
    with tier(tmp_path / "cache") as one:
        assert fetched(one, wanted) == contents


def test_another_model_finds_nothing_even_under_the_right_name(tmp_path: Path) -> None:
    wanted, contents = names(1), states(1)
    fingerprint = b"x" * 32
    with tier(tmp_path / "cache") as one:
        store(one, wanted, contents)
    with tier(tmp_path / "cache", fingerprint=fingerprint) as other:
        assert fetched(other, wanted) == []
        file = KEYS.file_name(fingerprint, wanted[0].digest)
        there = tmp_path / "cache" / version_folder(fingerprint) / KEYS.tenant_folder("blue") / file[:2]
        there.mkdir(parents=True)
        shutil.copy(_path(tmp_path / "cache", wanted[0]), there / file)
        assert fetched(other, wanted) == []
        assert other.stats.num_refused == 1


def test_teams_and_salts_do_not_meet(tmp_path: Path) -> None:
    scopes = (TEAM, Scope("red"), Scope("blue", "salt"), Scope("blue", "", b"adapter"), Scope(None))
    with tier(tmp_path / "cache") as one:
        for scope in scopes:
            assert fetched(one, names(2, scope)) == []
            store(one, names(2, scope), states(2))
        assert one.stats.num_files == 10
    teams = {path.parent.parent.name for path in files(tmp_path / "cache")}
    assert teams == {KEYS.tenant_folder("blue"), KEYS.tenant_folder("red"), KEYS.tenant_folder(None)}


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, contents = names(1), states(1)
    outside = tmp_path / "outside"
    outside.mkdir()
    with tier(tmp_path / "cache") as one:
        store(one, wanted, contents)
        team = _path(tmp_path / "cache", wanted[0]).parent.parent
        team.rename(outside / "team")
        team.symlink_to(outside / "team")
        before = files(outside)
        assert fetched(one, wanted) == []
        assert one.put(wanted[0], contents[0])
        assert one.flush(10)
        assert one.stats.num_failed == 2
    assert files(outside) == before
    assert "can't be read" in caplog.text
    assert "can't be written" in caplog.text


def test_discard_removes_what_llama_cpp_could_not_load(tmp_path: Path) -> None:
    wanted = names(2)
    with tier(tmp_path / "cache") as one:
        store(one, wanted, states(2))
        one.discard(wanted[0])
        until(lambda: one.num_known(wanted) == 0)
        assert len(files(tmp_path / "cache")) == 1
        one.discard(wanted[0])
        until(lambda: one.stats.num_refused == 2)


def test_reading_renews_the_time_of_use_rarely(tmp_path: Path) -> None:
    wanted = names(1)
    with tier(tmp_path / "cache") as one:
        store(one, wanted, states(1))
        path = _path(tmp_path / "cache", wanted[0])
        recent = time.time() - 30
        os.utime(path, (recent, recent))
        fetched(one, wanted)
        assert path.stat().st_mtime == pytest.approx(recent, abs=1)
        for long in (-100, 3600):  # ago, or ahead, since the clock stepped back
            os.utime(path, (recent + long, recent + long))
            fetched(one, wanted)
            assert path.stat().st_mtime == pytest.approx(time.time(), abs=5)


@pytest.mark.serial
def test_looking_for_states_takes_no_longer_while_many_are_queued(tmp_path: Path) -> None:
    """The engine looks once for each block of a prompt: it went through all that waits for a slow disk each time."""
    go = threading.Event()

    def identify(stop: Stop) -> bytes:
        go.wait(30)
        return FINGERPRINT

    line = np.arange(40_000, dtype=np.int32)
    mine = StateNames(line, TEAM)
    other = StateNames(line, Scope("red"))
    with tier(tmp_path / "cache", identify=identify) as one:
        assert all(one.put(mine.name(end), b"state") for end in range(64, 2064))
        stems = [other.stem(end) for end in range(64, 40_000, 64)]
        began = time.thread_time()
        assert not any(one.has_states(*stem) for _ in range(4) for stem in stems)
        assert time.thread_time() - began < 0.05
        assert one.has_states(*mine.stem(128))
        go.set()


def test_whole_states_survive_a_restart_and_are_found_by_their_stems(tmp_path: Path) -> None:
    line = np.arange(200, dtype=np.int32)
    mine, theirs = StateNames(line, TEAM), StateNames(line, Scope("red"))
    wanted, contents = [mine.name(end) for end in (70, 100, 150)], states(3)

    def found(one: DiskTier, names: StateNames) -> list[int]:
        return [end for end in (1, 64, 127, 128, 200) if one.has_states(*names.stem(end))]

    with tier(tmp_path / "cache") as one:
        assert found(one, mine) == []
        assert one.put(wanted[0], contents[0])
        assert found(one, mine) == [64, 127], "queued or written"
        store(one, wanted, contents)
        assert found(one, mine) == [64, 127, 128]
    with tier(tmp_path / "cache") as one:
        assert found(one, mine) == [64, 127, 128]
        assert found(one, theirs) == []
        assert [one.has(mine.name(end)) for end in (70, 71, 100)] == [True, False, True]
        assert [fetched(one, [name]) for name in wanted] == [[state] for state in contents]
        assert one.read_s(wanted) > 0
    with tier(tmp_path / "cache", secret="another") as one:
        assert found(one, mine) == []
    with tier(tmp_path / "cache", fingerprint=b"x" * 32) as one:
        assert found(one, mine) == []


def test_what_is_larger_than_a_file_may_be_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tier(tmp_path / "cache", max_block_bytes=STATE_BYTES, queue_bytes=10) as one:
        assert one.put(names(1)[0], b"x" * (STATE_BYTES + 1)), "there will never be room for it"
        assert one.stats.num_dropped == 1
        assert "more than a file may have" in caplog.text
        store(one, names(1), states(1))
        assert one.stats.num_written == 1, "a queue with nothing in it takes one of any size"


def test_room_in_the_queue_can_be_waited_for(tmp_path: Path) -> None:
    go = threading.Event()

    def identify(stop: Stop) -> bytes:
        go.wait(10)
        return FINGERPRINT

    wanted, contents = names(2), states(2)
    with tier(tmp_path / "cache", identify=identify, queue_bytes=STATE_BYTES) as one:
        assert one.wait_room(10 * STATE_BYTES, 0)
        assert one.put(wanted[0], contents[0])
        assert not one.wait_room(STATE_BYTES, 0.01)
        go.set()
        assert one.wait_room(STATE_BYTES, 10)
        assert one.put(wanted[1], contents[1])
        assert one.stats.num_dropped == 0


@pytest.mark.serial
def test_closing_stops_in_the_middle_of_a_file(tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as one:
        assert one.put(names(1)[0], bytes(256 << 20))
        started = time.perf_counter()
        one.close()
        assert time.perf_counter() - started < 0.5
        assert one.stats.num_dropped == 1
    assert files(tmp_path / "cache") == []


def test_what_a_worker_wrote_is_found_by_the_others_soon_after_it_left(tmp_path: Path) -> None:
    wanted, contents = names(3), states(3)
    with tier(tmp_path / "cache") as stays:
        until(lambda: stays.ready)
        with tier(tmp_path / "cache") as leaves:
            store(leaves, wanted, contents)
            assert stays.num_known(wanted) == 0, "it looks once a minute"
        until(lambda: stays.num_known(wanted) == 3)
        assert fetched(stays, wanted) == contents
        left = (tmp_path / "cache" / ".left").stat()
        assert stat.S_IMODE(left.st_mode) == 0o600
        with tier(tmp_path / "cache"):
            pass
        assert (tmp_path / "cache" / ".left").stat().st_mtime_ns == left.st_mtime_ns, "it had written nothing"
