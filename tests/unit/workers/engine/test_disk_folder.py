"""The folder that several workers share: who may use it, its cap, kills, erasure."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.workers.engine.disk_support import (
    FINGERPRINT,
    KEYS,
    SECRET,
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
from workers.engine.cache.prompt import BlockName, Scope
from workers.engine.disk.folder import ERASED, HURRIED_S, LEFT, SKEW_S, CacheFolder, CacheFolderUnusable, DiskIndex
from workers.engine.disk.sealed import HEADER, SEAL_BYTES, Kind, SealedReader
from workers.engine.disk.tier import DiskTier

FILE_BYTES = STATE_BYTES + HEADER.size + SEAL_BYTES
ROOT = Path(__file__).resolve().parents[4]

WRITER = """
import resource, sys
from pathlib import Path
from tests.unit.workers.engine.disk_support import names, tier

seed, count, max_bytes, size, limit = map(int, sys.argv[2:])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with tier(Path(sys.argv[1]), max_bytes=max_bytes) as one:
    print("ready", flush=True)
    for name in names(count, seed=seed):
        one.put(name, name.digest * (size // 32))
        one.flush(60)
        print(name.end // 64 - 1, flush=True)
    print(one.stats.num_failed, one.stats.num_evicted, flush=True)
"""


def writer(
    cache: Path, seed: int, count: int, *, max_bytes: int = 1 << 40, size: int = STATE_BYTES, limit: int = 0
) -> subprocess.Popen[str]:
    """A process that writes blocks and tells of each; `limit`: bytes of a file that the system lets it write."""
    argv = [sys.executable, "-c", WRITER, str(cache), *map(str, (seed, count, max_bytes, size, limit))]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def total(cache: Path) -> int:
    return sum(file.stat().st_size for file in files(cache))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o770, 0o702, 0o1777):
        shared = tmp_path / "shared"
        shared.mkdir(exist_ok=True)
        shared.chmod(mode)
        with pytest.raises(CacheFolderUnusable, match=r"other users may write to it .*chmod go-w"):
            CacheFolder(shared)
    shared.chmod(0o755)
    CacheFolder(shared).close()


def test_a_link_a_file_and_a_missing_parent(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CacheFolderUnusable, match="symbolic link"):
        CacheFolder(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderUnusable, match="name a folder"):
        CacheFolder(tmp_path / "file")
    CacheFolder(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert files(tmp_path / "a") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(CacheFolderUnusable, match="belongs to user 12345"):
        CacheFolder(tmp_path / "theirs")


def test_the_cap_holds_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    cache, cap = tmp_path / "cache", 20 * FILE_BYTES
    wanted, contents = names(40), states(40)
    with tier(cache, max_bytes=cap) as one:
        store(one, wanted[:20], contents[:20])
        assert total(cache) == cap
        long_ago = time.time() - 1000
        for number, path in enumerate(files(cache)):
            os.utime(path, (long_ago + number, long_ago + number))
        assert fetched(one, wanted[:5]) == contents[:5]
        for name, state in zip(wanted[20:25], contents[20:25], strict=True):
            store(one, [name], [state])
            assert total(cache) <= cap
        assert one.num_known(wanted[:5]) == 5
        assert one.num_known(wanted[20:25]) == 5
        assert one.stats.num_evicted >= 5
        assert one.stats.num_bytes == total(cache)
        store(one, wanted[25:], contents[25:])
        until(lambda: total(cache) <= cap)


def test_two_processes_share_a_folder_under_its_cap(tmp_path: Path) -> None:
    cache, cap = tmp_path / "cache", 30 * FILE_BYTES
    writers = [writer(cache, seed, 120, max_bytes=cap) for seed in (1, 2)]
    ends = []
    for process in writers:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        ends.append([int(word) for word in out.splitlines()[-1].split()])
    assert [failed for failed, _ in ends] == [0, 0]
    assert all(evicted > 0 for _, evicted in ends)
    with tier(cache, max_bytes=cap) as one:
        kept = [name for seed in (1, 2) for name in names(120, seed=seed) if one.has(name)]
        assert len(kept) == one.stats.num_files > 0
        for name in kept:
            assert fetched(one, [name]) == [name.digest * (STATE_BYTES // 32)]
        store(one, names(1, seed=3), states(1))
        assert total(cache) <= cap


def test_a_write_that_the_system_refuses_costs_the_block_only(tmp_path: Path) -> None:
    process = writer(tmp_path / "cache", 1, 5, size=1 << 17, limit=1 << 16)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "5 0"
    assert files(tmp_path / "cache") == []


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("only Linux lists a process's descriptors")
    before = os.listdir("/proc/self/fd")
    with tier(tmp_path / "cache") as one:
        store(one, names(5), states(5))
        fetched(one, names(6))
        one.discard(names(1)[0])
    with tier(tmp_path / "cache"):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_what_another_process_wrote_is_found_at_once_and_known_after_a_scan(tmp_path: Path) -> None:
    cache, wanted = tmp_path / "cache", names(3, seed=9)
    with tier(cache) as one:
        process = writer(cache, 9, 300)
        assert process.stdout is not None
        while process.stdout.readline() != "2\n":
            assert process.poll() is None
        process.kill()  # one that leaves in order has the others scan the folder
        process.communicate(timeout=60)
        assert one.num_known(wanted) == 0
        assert len(fetched(one, wanted)) == 3
    with tier(cache) as one:
        assert one.num_known(wanted) == 3


def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path) -> None:
    cache, size, chance = tmp_path / "cache", 1 << 19, random.Random(4)
    told = 0
    for seed in range(6):
        process = writer(cache, seed, 300, size=size)
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(chance.randint(1, 6))]
        assert first[0] == "ready\n"
        time.sleep(chance.uniform(0.0, 0.01))
        os.kill(process.pid, signal.SIGKILL)
        lines = [*first[1:], *process.stdout.read().splitlines(keepends=True)]
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        count = max((int(line) + 1 for line in lines if line.endswith("\n")), default=0)
        assert count < 300, "it was not killed while it wrote"
        told += count
        with tier(cache) as one:
            for name in names(300, seed=seed)[:count]:
                assert fetched(one, [name]) == [name.digest * (size // 32)], "it was said to be written"
    assert told > 0
    whole = [path for path in files(cache) if not path.name.endswith(".tmp")]
    for path in whole:
        folder = os.open(path.parent, os.O_RDONLY)
        with SealedReader(folder, path.name, KEYS.seal, max_bytes=size * 2) as file:
            label, length = file.label()
            assert file.take(length) == label.digest * (size // 32)
            file.verify()
            assert (label.kind, label.fingerprint) == (Kind.BLOCK, FINGERPRINT)
        os.close(folder)
    assert len(whole) >= told


def test_unfinished_files_are_removed_when_they_are_old(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with tier(cache) as one:
        store(one, names(1), states(1))
    leaf = files(cache)[0].parent
    for name, age_s in ((".0123456789abcdef.tmp", 7200), (".fedcba9876543210.tmp", 60)):
        (leaf / name).write_bytes(b"half")
        os.utime(leaf / name, (time.time() - age_s, time.time() - age_s))
    (leaf / "somebody's notes").write_text("")
    with tier(cache) as one:
        assert one.stats.num_files == 1
    assert {path.name for path in leaf.iterdir()} - {files(cache)[-1].name} >= {".fedcba9876543210.tmp"}
    assert {path.name for path in leaf.iterdir() if path.name.startswith((".", "some"))} == {
        ".fedcba9876543210.tmp",
        "somebody's notes",
    }


def test_empty_folders_go_when_they_are_old(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with tier(cache) as one:
        store(one, names(1), states(1))
        one.discard(names(1)[0])
        until(lambda: one.stats.num_refused == 1)
    leaf = next(path for path in cache.rglob("*") if len(path.name) == 2)
    os.utime(leaf, (1, 1))
    with tier(cache):
        pass
    assert [path.name for path in cache.iterdir()] == [LEFT]


def test_erasing_a_team_leaves_the_others(tmp_path: Path) -> None:
    cache, red = tmp_path / "cache", Scope("red")
    for fingerprint in (FINGERPRINT, b"y" * 32):
        with tier(cache, fingerprint=fingerprint) as one:
            store(one, names(4), states(4))
            store(one, names(3, red), states(3))
    folder = CacheFolder(cache)
    assert folder.erase(KEYS.tenant_folder("blue")) == 8
    assert folder.erase(KEYS.tenant_folder("blue")) == 0
    assert len(files(cache)) == 6
    with tier(cache) as one:
        assert fetched(one, names(4)) == []
        assert len(fetched(one, names(3, red))) == 3
        assert folder.erase_all() == 6
        assert fetched(one, names(3, red)) == []
    folder.close()
    assert files(cache) == []


def test_erasing_while_a_worker_writes(tmp_path: Path) -> None:
    """It goes on until some files were erased: how many a disk can write and sync in a while is not known."""
    cache, over = tmp_path / "cache", threading.Event()
    with tier(cache) as one:
        folder, num_put = CacheFolder(cache), 0

        def write() -> None:
            nonlocal num_put
            for name in itertools.takewhile(lambda _: not over.is_set(), names(10_000)):
                one.put(name, bytes(STATE_BYTES))
                num_put += 1
                one.flush(60)

        writing = threading.Thread(target=write)
        writing.start()
        erased = 0
        while writing.is_alive() and erased < 10:
            erased += folder.erase(KEYS.tenant_folder("blue"))
        over.set()
        writing.join()
        erased += folder.erase(KEYS.tenant_folder("blue"))
        folder.close()
        assert erased >= 10
        assert one.stats.num_written + one.stats.num_failed == num_put
    assert files(cache) == []


def test_an_erasure_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with tier(cache) as one:
        store(one, names(2), states(2))
    team = files(cache)[0].parent.parent
    team.rename(team.parent / f"{ERASED}0123")
    folder = CacheFolder(cache)
    assert folder.erase(KEYS.tenant_folder("red")) == 2
    folder.close()
    assert files(cache) == []


def test_an_erasure_does_not_follow_links(tmp_path: Path) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("text")
    with tier(cache) as one:
        store(one, names(1), states(1))
    team = files(cache)[0].parent.parent
    (team / "ff").symlink_to(outside) if not (team / "ff").exists() else None
    folder = CacheFolder(cache)
    folder.erase(KEYS.tenant_folder("blue"))
    team.symlink_to(outside)
    folder.erase(KEYS.tenant_folder("blue"))
    folder.close()
    assert (outside / "precious").read_text() == "text"


def test_a_scan_keeps_what_is_written_meanwhile(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache")
    with tier(tmp_path / "cache") as one:
        store(one, names(8), states(8))
    index = DiskIndex(folder, 1 << 30)
    places = [entry.place for leaf in folder.leaves() for entry in folder.entries(leaf)]
    scan = index.scan()
    next(scan)
    new = places[0]
    folder.remove(new)
    index.add(new, 77)
    assert sum(1 for _ in scan) >= 0
    assert index.num_files == 8
    assert index.num_bytes == 7 * FILE_BYTES + 77
    index.forget(new)
    assert index.num_bytes == 7 * FILE_BYTES
    folder.close()


def test_a_folder_swapped_under_a_running_worker_gets_nothing(tmp_path: Path) -> None:
    """The worker holds the folder it checked; what somebody puts under its name later is not used."""
    cache = tmp_path / "cache"
    with tier(cache) as one:
        cache.rename(tmp_path / "moved")
        cache.mkdir(mode=0o777)
        store(one, names(2, TEAM), states(2))
    assert files(cache) == []
    assert len(files(tmp_path / "moved")) == 2
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in files(tmp_path / "moved"))


def test_what_others_wrote_is_seen_before_the_folder_is_much_too_full(tmp_path: Path) -> None:
    """Each worker knew of its own files only, for a minute or until those alone were too many."""
    cache, cap = tmp_path / "cache", 24 * FILE_BYTES
    with tier(cache, max_bytes=cap) as one, tier(cache, max_bytes=cap) as other:
        store(other, names(23, seed=1), states(23))
        assert one.stats.num_bytes == 0
        time.sleep(HURRIED_S + 0.2)
        store(one, names(3, seed=2), states(3))
        until(lambda: total(cache) <= cap)
        assert one.num_known(names(3, seed=2)) == 3
        assert one.stats.num_evicted > 0


def test_the_index_is_outdated_once_this_process_has_written_a_share_of_the_room(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache")
    with tier(tmp_path / "cache") as one:
        store(one, names(8), states(8))
    index = DiskIndex(folder, 16 * FILE_BYTES)
    places = [entry.place for leaf in folder.leaves() for entry in folder.entries(leaf)]
    for place in places:
        folder.remove(place)
    for _ in index.scan():
        pass
    assert index.num_files == 0
    index.add(places[0], FILE_BYTES)
    index.add(places[1], FILE_BYTES)
    found = []
    for is_new in (False, True):
        found.append(index.is_outdated)  # too soon after the last scan
        index.next_hurried_at = 0.0
        found.append(index.is_outdated)
        for _ in index.scan() if not is_new else ():
            pass
    assert found == [False, True, False, False]
    folder.close()


@pytest.mark.parametrize("is_running", [False, True])
def test_a_clock_that_stepped_back_makes_no_file_stay_for_ever(tmp_path: Path, *, is_running: bool) -> None:
    cache, cap, ahead_s = tmp_path / "cache", 20 * FILE_BYTES, 3600.0
    old = names(20)

    def step_back() -> None:
        """As seen by the files."""
        for path in files(cache):
            os.utime(path, (time.time() + ahead_s, time.time() + ahead_s))

    with tier(cache, max_bytes=cap) as one:
        store(one, old, states(20))
        if is_running:
            step_back()
            _write_and_find_the_newest(one)
            assert not any(one.has(name) for name in old)
    if not is_running:
        step_back()
        with tier(cache, max_bytes=cap) as one:
            _write_and_find_the_newest(one)
            assert not any(one.has(name) for name in old)
    assert all(path.stat().st_mtime < time.time() + 1 for path in files(cache))


def _write_and_find_the_newest(one: DiskTier) -> None:
    """Write more than the folder may have, a file at a time, and expect each to stay while ten more come."""
    written: list[BlockName] = []
    for name in names(40, seed=1):
        store(one, [name], states(1))
        written.append(name)
        until(lambda: one.stats.num_bytes <= 20 * FILE_BYTES)
        assert all(one.has(each) for each in written[-10:])


def test_clocks_of_machines_may_differ(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with tier(cache) as one:
        store(one, names(1), states(1))
    [path] = files(cache)
    soon = time.time() + SKEW_S / 2
    os.utime(path, (soon, soon))
    with tier(cache) as one:
        assert one.stats.num_files == 1
    assert path.stat().st_mtime == pytest.approx(soon, abs=1)
