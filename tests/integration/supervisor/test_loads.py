"""The life of a load under a real supervisor: how far it is, how it fails, and when it is tried again."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import redis

from tests.integration.supervisor.conftest import Catalog, Program, Programs, wait_until
from tests.integration.supervisor.test_catalog_changes import boots
from tests.integration.supervisor.test_residents import LAZY, Crowd, is_loaded, kill_worker, states
from tests.support.redis_server import RedisServer
from workers.process.black_box import progress_of
from workers.protocol import keys
from workers.protocol.residency import ModelState


def start(programs: Programs, server: RedisServer, catalog: Catalog, stall_s: float = 60.0, **more: object) -> Program:
    catalog.write(*(catalog.entry(name, residency=LAZY, **more) for name in ("a", "b")))
    return programs.start(
        "supervisor",
        *("--catalog", str(catalog.file), "--load-stall-s", str(stall_s)),
        PADDOCK_REDIS_URL=server.url,
        PADDOCK_WORKER_SECRET="shared",
    )


def stop_while_loading(station: Program, crowd: Crowd) -> int:
    """Stop the first worker, as a debugger would, as soon as it loads; return its process id."""
    record = station.state / "run" / "worker-0.calls"

    def loads() -> bool:
        crowd.tell()
        return progress_of(record) is not None

    wait_until(loads, station.text)
    pid = station.worker_pid("worker-0")
    os.kill(pid, signal.SIGSTOP)
    return pid


def until_state(
    client: redis.Redis, station: Program, crowd: Crowd, model: str, holds: Callable[[ModelState], bool]
) -> ModelState:
    found: list[ModelState] = []

    def happened() -> bool:
        crowd.tell()
        found[:] = [state for name, state in states(client).items() if name == model]
        return bool(found) and holds(found[0])

    wait_until(happened, lambda: f"{found}\n{station.text()}")
    return found[0]


def test_how_far_a_load_is_and_that_it_goes_on(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    pid = stop_while_loading(station, crowd)
    state = until_state(client, station, crowd, "a", lambda state: state.progress is not None)
    assert state.status == "loading"
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    state = until_state(client, station, crowd, "a", lambda state: state.status == "loaded")
    assert (state.progress, state.num_failures) == (None, 0)


def test_a_load_that_hangs_is_ended_and_tried_again(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog, stall_s=2.0), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    pid = stop_while_loading(station, crowd)
    state = until_state(client, station, crowd, "a", lambda state: state.status == "failed")
    assert state.why.whole.startswith("it did nothing for 2 s while it loaded, with ")
    assert (state.num_failures, state.exit_code) == (1, None)
    assert state.retry_at > time.time()
    until = time.monotonic() + 5.0  # not after the time that a worker has to drain
    while psutil.pid_exists(pid):
        assert time.monotonic() < until
        time.sleep(0.02)
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    assert until_state(client, station, crowd, "a", lambda state: state.status == "loaded").num_failures == 0


def test_a_load_that_is_killed_is_tried_again_at_once_and_then_is_a_failure(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    seen: set[str] = set()

    def is_there() -> bool:
        seen.add(states(client)["a"].status)
        return is_loaded(server, crowd, "a")

    kill_worker(station, crowd)
    wait_until(is_there, station.text)
    assert "failed" not in seen, "its callers wait for the next try"
    crowd.wait_for("b")
    for _ in range(2):
        kill_worker(station, crowd, "worker-1")
        time.sleep(0.1)
    state = until_state(client, station, crowd, "b", lambda state: state.status == "failed")
    assert state.why.whole.startswith("SIGKILL (killed, as the system does where memory runs out)")
    assert (state.num_failures, state.exit_code) == (1, -signal.SIGKILL)


def test_what_says_why_it_can_t_load_is_told_with_its_log(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """The file is damaged after its memory was predicted."""
    cut = catalog.file.with_name("cut.gguf")
    cut.write_bytes(Path(catalog.entry("a")["path"]).read_bytes())
    station, crowd = start(programs, server, catalog, path=str(cut)), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)  # so it is predicted
    crowd.models = {}
    client.set(keys.unloaded("a"), 1)
    wait_until(lambda: is_loaded(server, crowd), station.text)
    client.delete(keys.unloaded("a"))
    before = cut.stat()
    with cut.open("r+b") as file:  # as a disk that fails does it: size and time stay, so that it is not looked at anew
        file.seek(8)
        file.write(b"\xff" * 16)
    os.utime(cut, ns=(before.st_atime_ns, before.st_mtime_ns))
    client.hset(keys.ASKED, "a", str(time.time()))
    state = until_state(client, station, crowd, "a", lambda state: state.status == "failed")
    assert state.exit_code is not None
    assert str(cut.parent) not in state.why.whole
    assert "cut.gguf" in state.why.whole
    assert any("cut.gguf" in line for line in state.log)
    first = state.retry_at
    client.hset(keys.ASKED, "a", str(time.time()))
    state = until_state(client, station, crowd, "a", lambda state: state.retry_at not in (0.0, first))
    assert state.num_failures == 1, "an admin's wish is a new try"
    station.send(signal.SIGTERM)


def test_a_worker_that_dies_of_a_file_that_was_cut_short_says_so(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """Somebody copies another file in its place, say, while the worker has it mapped: reading a page beyond its end is
    SIGBUS, and the worker says nothing itself."""
    cut = catalog.file.with_name("cut.gguf")
    cut.write_bytes(Path(catalog.entry("a")["path"]).read_bytes())
    size = cut.stat().st_size
    station, crowd = start(programs, server, catalog, path=str(cut)), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    until_state(client, station, crowd, "a", lambda state: state.status == "loaded")
    os.truncate(cut, size - 4096)
    os.kill(station.worker_pid("worker-0"), signal.SIGBUS)
    state = until_state(client, station, crowd, "a", lambda state: state.status == "failed")
    said = f"cut.gguf: truncated: the file is shorter than its header says, {size - 4096:,} of "
    assert said in state.why.whole
    assert re.search(rf"worker-0 died of a file of a: .*{re.escape(said)}", station.text())
    assert re.search(rf"worker-0 of a leaves: {re.escape(said)}", station.text()), "callers are told no folders"


def test_workers_that_die_while_they_serve_are_a_crash_loop(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    before: dict[str, str] = {}
    for number in range(3):
        wait_until(lambda: is_loaded(server, crowd, "a") and boots(server, "a") != before, station.text)  # noqa: B023 - it is called in this round
        before = boots(server, "a")
        until_state(client, station, crowd, "a", lambda state: state.status == "loaded")
        with suppress(ProcessLookupError):
            os.kill(station.worker_pid("worker-0"), signal.SIGSEGV)
        if number < 2:
            until_state(client, station, crowd, "a", lambda state: state.status == "loading")
    state = until_state(client, station, crowd, "a", lambda state: state.status == "failed")
    assert state.why.whole.startswith(
        "crash loop: 3 workers in a row died soon after they were loaded, the last by SIGSEGV"
    )
    assert (state.num_failures, state.exit_code) == (3, -signal.SIGSEGV)
    assert not boots(server, "a")
    client.hset(keys.ASKED, "a", str(time.time()))
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)


def test_a_worker_that_somebody_stops_is_replaced(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """Its exit code says that it is not to be started again, and its model loaded for half an hour."""
    station, crowd = start(programs, server, catalog), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    before = boots(server, "a")
    until_state(client, station, crowd, "a", lambda state: state.status == "loaded")
    os.kill(station.worker_pid("worker-0"), signal.SIGTERM)
    wait_until(lambda: is_loaded(server, crowd, "a") and boots(server, "a") != before, station.text)


def test_an_unload_ends_a_load_at_once(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog), Crowd(client)
    wait_until(lambda: len(states(client)) == 2, station.text)
    crowd.wait_for("a")
    kill = stop_while_loading(station, crowd)
    crowd.models = {}
    crowd.tell()
    client.set(keys.unloaded("a"), 1)
    os.kill(kill, signal.SIGCONT)
    began = time.monotonic()
    wait_until(lambda: not psutil.pid_exists(kill), station.text)
    assert time.monotonic() - began < 3.0
    state = until_state(client, station, crowd, "a", lambda state: state.status == "unloaded")
    assert state.num_failures == 0
