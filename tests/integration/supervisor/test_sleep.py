"""Models that sleep: their workers are gone, and a keeper holds their files in main memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from tests.integration.supervisor.conftest import Catalog, Programs, wait_until
from tests.integration.supervisor.test_catalog_changes import station_of
from tests.integration.supervisor.test_residents import LAZY, Crowd, is_loaded, states
from tests.support.redis_server import RedisServer
from workers.process import parent_death
from workers.protocol import keys
from workers.supervisor.loading.keepers import MODULE, Keepers

SLEEPY = {**LAZY, "ttl_s": 0.5, "idle": "sleep"}
SIZE = 8 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(os.urandom(SIZE))
    return path


def keepers_of(parent: int) -> list[int]:
    """The processes that keep files for a supervisor."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if MODULE.encode() in words and int(stat[1]) == parent and stat[0] != "Z":
            found.append(int(folder.name))
    return found


def mapped_kib(pid: int, file: Path, field: str) -> int:
    """What `/proc/PID/smaps` says of a mapped file."""
    is_files, found = False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            is_files = line.endswith(str(file))
        elif is_files and line.startswith(f"{field}:"):
            found += int(line.split()[1])
    return found


def test_a_model_sleeps_wakes_and_is_unloaded(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    catalog.write(catalog.entry("a", residency={**SLEEPY, "autoload": False}), catalog.entry("b", residency=LAZY))
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    client.hset(keys.ASKED, "a", str(time.time()))
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    crowd.models = {}
    crowd.tell()
    wait_until(lambda: states(client)["a"].status == "sleeping", station.text)
    told = states(client)["a"]
    assert told.why.whole.startswith("a sleeps; its weights (")
    assert not told.is_hopeless
    assert not told.is_closed
    wait_until(lambda: len(keepers_of(station.popen.pid)) == 1, station.text)
    crowd.wait_for("a")  # although calls don't load it, one wakes it
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    wait_until(lambda: not keepers_of(station.popen.pid), station.text)
    crowd.models = {}
    crowd.tell()
    wait_until(lambda: states(client)["a"].status == "sleeping", station.text)
    client.set(keys.unloaded("a"), 1, px=5000)
    wait_until(lambda: states(client)["a"].status == "unloaded", station.text)
    wait_until(lambda: not keepers_of(station.popen.pid), station.text)


def test_a_model_that_gives_way_to_another_sleeps_and_wakes(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """There is memory for the weights of both, but one place."""
    sleeps = {**LAZY, "idle": "sleep"}
    catalog.write(catalog.entry("a", residency=sleeps), catalog.entry("b", residency=sleeps), models_max=1)
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    crowd.wait_for("b")
    wait_until(lambda: is_loaded(server, crowd, "b"), station.text)
    wait_until(lambda: states(client)["a"].status == "sleeping", station.text)
    (first,) = keepers_of(station.popen.pid)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    wait_until(lambda: states(client)["b"].status == "sleeping", station.text)
    wait_until(lambda: first not in keepers_of(station.popen.pid), station.text)
    assert len(keepers_of(station.popen.pid)) == 1, "it holds the weights of b, and the worker those of a"
    client.set(keys.unloaded("b"), 1, px=5000)
    wait_until(lambda: states(client)["b"].status == "unloaded", station.text)
    wait_until(lambda: not keepers_of(station.popen.pid), station.text)


def test_what_a_supervisor_keeps_ends_with_it_and_when_it_is_killed(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    catalog.write(catalog.entry("a", residency=SLEEPY))
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    for _ in range(2):
        crowd.wait_for("a")
        wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
        crowd.models = {}
        crowd.tell()
        wait_until(lambda: len(keepers_of(station.popen.pid)) == 1, station.text)
        (keeper,) = keepers_of(station.popen.pid)
        os.kill(keeper, signal.SIGKILL)  # as the kernel does where memory is short
        wait_until(lambda: states(client)["a"].status == "unloaded", station.text)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    crowd.models = {}
    crowd.tell()
    wait_until(lambda: len(keepers_of(station.popen.pid)) == 1, station.text)
    (keeper,) = keepers_of(station.popen.pid)
    station.popen.send_signal(signal.SIGTERM)
    assert station.popen.wait(20) == 0, station.text()
    assert not Path(f"/proc/{keeper}").exists()


@pytest.mark.parametrize("limit", ["unlimited", "0"])
def test_a_keeper_holds_every_page(file: Path, limit: str) -> None:
    """Where it may lock nothing, it reads."""
    command = [sys.executable, "-m", MODULE, str(file)]
    if limit == "0":
        command = [
            "setpriv",
            "--bounding-set",
            "-ipc_lock",
            "--inh-caps",
            "-ipc_lock",
            "prlimit",
            "--memlock=0:0",
            *command,
        ]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, parent_death.VARIABLE: str(os.getpid())},
    ) as process:
        try:
            assert process.stdout is not None
            locked = int(process.stdout.readline())
            assert locked == (SIZE if limit == "unlimited" else 0)
            assert mapped_kib(process.pid, file, "Rss") == SIZE >> 10
            assert mapped_kib(process.pid, file, "Locked") == locked >> 10
            assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
        finally:
            process.kill()


def test_keepers_give_their_memory_back_the_one_that_sleeps_longest_first(file: Path) -> None:
    said: list[str] = []
    keepers = Keepers(said.append)
    try:
        for model in ("a", "b", "c"):
            keepers.start(model, [file], SIZE, is_shared=model == "a")
        assert keepers.taken_bytes() == 3 * SIZE
        assert keepers.taken_bytes({"a", "b"}) == 2 * SIZE, "only the worker of a uses the pages of its keeper"

        def is_read() -> bool:
            keepers.look()
            return not keepers.is_reading

        wait_until(is_read, lambda: str(said))
        assert keepers.locked_bytes in (0, 3 * SIZE)
        assert keepers.end_first("d is loaded", but="a")
        assert [*keepers.models] == ["a", "c"]
        assert keepers.end_first("d is loaded", but="a")
        assert keepers.end_first("d is loaded", but="a")
        assert not keepers.end_first("d is loaded", but="a")

        def is_gone() -> bool:
            keepers.look()
            return not keepers.is_ending

        wait_until(is_gone, lambda: str(said))
        assert (keepers.taken_bytes(), keepers.locked_bytes, [*keepers.models]) == (0, 0, [])
        assert [line.split(" are kept")[0].rpartition(" ")[2] for line in said] == ["b", "c", "a"]
    finally:
        keepers.close()


def test_files_that_can_not_be_kept_are_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    keepers = Keepers(said.append)
    keepers.start("a", [tmp_path / "gone.gguf"], SIZE, is_shared=True)

    def has_ended() -> bool:
        keepers.look()
        return not keepers.models

    wait_until(has_ended, lambda: str(said))
    assert said == ["paddock: the weights of a are kept in memory no more: their keeper has ended"]
    keepers.close()
