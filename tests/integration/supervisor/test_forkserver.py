"""Workers that are forks of one process: whose children they are, what they know, and how they live and die."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.integration.supervisor.conftest import Catalog, Program, Programs, wait_until
from tests.integration.supervisor.test_catalog_changes import boots, station_of
from tests.support.redis_server import RedisServer
from tests.support.stack import ROOT
from workers.forkserver.client import ForkedProcess, ForkServer
from workers.forkserver.helpers import NUM_AHEAD
from workers.protocol.exits import Exit
from workers.supervisor.output import Console
from workers.supervisor.processes import Recipe, reap_strays

WORKER = (sys.executable, "-m", "workers.cli", "worker")
AS_PROGRAM = ("/bin/sh", "-c", "echo a program")


def forking(station: Program) -> psutil.Process | None:
    """Return the process that forks; None while there is none."""
    children = psutil.Process(station.popen.pid).children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return next((child for child in alive if child.cmdline()[-1:] == ["workers.forkserver"]), None)


def test_workers_are_the_supervisors_own_children_and_outlive_the_process_that_forks(
    programs: Programs, server: RedisServer, catalog: Catalog
) -> None:
    catalog.write(catalog.entry("one"), catalog.entry("two"))
    station = station_of(programs, server, catalog)
    wait_until(lambda: len(boots(server, "one", "two")) == 2, station.text)
    first = boots(server, "one", "two")
    worker, other = (psutil.Process(station.worker_pid(name)) for name in ("worker-0", "worker-1"))
    for one in (worker, other):
        assert one.ppid() == station.popen.pid
        assert os.getpgid(one.pid) == os.getsid(one.pid) == one.pid
        assert one.cmdline()[-2:] == ["workers.cli", "worker"]
    forks = forking(station)
    assert forks is not None
    assert forks.num_threads() == 1
    secrets = [name for name in forks.environ() if name.startswith("PADDOCK_")]
    assert sorted(secrets) == ["PADDOCK_DIE_WITH_PARENT", "PADDOCK_FORK_SOCKET"]
    assert "shared" not in Path(f"/proc/{worker.pid}/environ").read_text(errors="replace")

    forks.kill()
    wait_until(lambda: forking(station) not in (None, forks), station.text)
    assert boots(server, "one", "two") == first
    worker.kill()
    wait_until(lambda: boots(server, "one", "two") != first and len(boots(server, "one")) == 1, station.text)
    assert boots(server, "two").items() <= first.items()
    assert psutil.Process(station.worker_pid("worker-0")).ppid() == station.popen.pid
    assert "worker-0 died (SIGKILL)" in station.text()

    station.family()
    assert not [child for child in psutil.Process(station.popen.pid).children() if child.status() == "zombie"]
    assert station.stop(signal.SIGTERM) == 0, station.text()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))


def test_forked_workers_end_with_a_supervisor_that_is_killed(
    programs: Programs, server: RedisServer, catalog: Catalog
) -> None:
    catalog.write(catalog.entry("one"))
    station = station_of(programs, server, catalog)
    wait_until(lambda: bool(boots(server, "one")), station.text)
    station.family()
    station.popen.kill()
    station.popen.wait()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))


def test_workers_are_programs_where_the_setting_says_so(
    programs: Programs, server: RedisServer, catalog: Catalog
) -> None:
    catalog.write(catalog.entry("one"))
    station = programs.start(
        "supervisor",
        *("--catalog", str(catalog.file)),
        PADDOCK_REDIS_URL=server.url,
        PADDOCK_WORKER_SECRET="shared",
        PADDOCK_FORK_WORKERS="false",
    )
    wait_until(lambda: bool(boots(server, "one")), station.text)
    commands = [child.cmdline()[-1] for child in psutil.Process(station.popen.pid).children()]
    assert commands == ["worker"]
    assert station.stop(signal.SIGTERM) == 0


class Forking:
    """A process that forks, under test, and what was said about it."""

    def __init__(self, folder: Path, environment: dict[str, str], *, forks_ahead: bool) -> None:
        self.terminal = io.StringIO()
        self.environment = environment
        console = Console("info", partial(print, file=self.terminal))
        self.server = ForkServer(folder, console, environment, forks_ahead=forks_ahead)
        self.pids: list[int] = []

    async def run(self, argv: tuple[str, ...], **variables: str) -> tuple[bool, int, str]:
        """Return whether the process was forked, its exit code, and its output."""
        read_end, write_end = os.pipe()
        with open(read_end, "rb") as output:
            try:
                recipe = Recipe("worker-0", argv, {**self.environment, **variables}, 5.0)
                process = await self.server.start(recipe, write_end)
            finally:
                os.close(write_end)
            self.pids.append(process.pid)
            code = await process.wait()
            return isinstance(process, ForkedProcess), code, (await asyncio.to_thread(output.read)).decode()

    async def forked_ahead(self) -> psutil.Process:
        """Wait until a process without identity is there, and return it."""
        async with asyncio.timeout(30):
            while True:
                for child in psutil.Process().children():
                    with suppress(psutil.Error):  # it has just ended
                        if child.pid not in (self.server.pid, *self.pids) and is_forked_ahead(child):
                            await asyncio.sleep(0.2)  # it tells its process id now
                            return child
                await asyncio.sleep(0.02)


def is_forked_ahead(process: psutil.Process) -> bool:
    return process.cmdline()[-1:] == ["workers.forkserver"] and len(process.children()) == NUM_AHEAD


@asynccontextmanager
async def forks(folder: Path, *, forks_ahead: bool = False, **variables: str) -> AsyncIterator[Forking]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    made = Forking(folder, {**clean, **variables}, forks_ahead=forks_ahead)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(made.server.keep())
        try:
            yield made
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping


async def test_a_forked_process_gets_its_environment_over_a_private_socket(tmp_path: Path) -> None:
    async with forks(tmp_path) as made:
        long = "x" * 500_000  # more than a socket takes at once
        forked, code, told = await made.run(WORKER, PADDOCK_MODEL="none.gguf", PADDOCK_API_KEY=long)
        assert (forked, code) == (True, Exit.USAGE)
        assert told.startswith("paddock: redis_url is unset")
        forked, code, told = await made.run(WORKER, PADDOCK_SLOTS="none", CUDA_VISIBLE_DEVICES="1")
        assert (forked, code) == (True, Exit.USAGE)
        assert "PADDOCK_SLOTS" in told
        assert made.terminal.getvalue() == ""


async def test_what_libraries_read_when_they_are_loaded_makes_a_worker_a_program(tmp_path: Path) -> None:
    async with forks(tmp_path) as made:
        assert await made.run(AS_PROGRAM, OMP_NUM_THREADS="7") == (False, 0, "a program\n")
        assert await made.run(AS_PROGRAM, LD_PRELOAD="") == (False, 0, "a program\n")


async def test_a_worker_is_a_program_where_nothing_can_be_forked(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "llguidance.py").write_text("raise RuntimeError('it does not load')\n")
    async with forks(tmp_path, PYTHONPATH=os.pathsep.join([str(broken), str(ROOT)])) as made:
        assert await made.run(AS_PROGRAM) == (False, 0, "a program\n")
        assert "it does not load" in made.terminal.getvalue()
        assert "worker-0 is started as a program: no process can be forked" in made.terminal.getvalue()


async def test_orders_outlive_the_process_that_should_take_them(tmp_path: Path) -> None:
    async with forks(tmp_path) as made:
        async with asyncio.timeout(30):
            while made.server.pid is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        running = asyncio.create_task(made.run(WORKER))
        await asyncio.sleep(0.1)
        os.kill(made.server.pid, signal.SIGKILL)
        assert (await running)[:2] == (True, Exit.USAGE)


async def test_the_next_worker_is_forked_ahead(tmp_path: Path) -> None:
    async with forks(tmp_path, forks_ahead=True) as made:
        for _ in range(2):
            waiting = await made.forked_ahead()
            assert os.getpgid(waiting.pid) == waiting.pid
            forked, code, told = await made.run(WORKER, PADDOCK_MODEL="none.gguf")
            assert (forked, code) == (True, Exit.USAGE)
            assert told.startswith("paddock: redis_url is unset")
            assert made.pids[-1] == waiting.pid
        assert (await made.run(WORKER))[:2] == (True, Exit.USAGE), "and another one before there is one again"
        killed = await made.forked_ahead()
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert (await made.run(WORKER))[:2] == (True, Exit.USAGE)
        assert made.pids[-1] != killed.pid
        last = await made.forked_ahead()
        helpers = last.children()
        assert made.terminal.getvalue() == ""
    assert not last.is_running()
    _, alive = psutil.wait_procs(helpers, timeout=10)
    assert not alive


async def test_a_process_that_was_forked_ahead_outlives_the_process_that_forks(tmp_path: Path) -> None:
    async with forks(tmp_path, forks_ahead=True) as made:
        waiting = await made.forked_ahead()
        assert made.server.pid is not None
        os.kill(made.server.pid, signal.SIGKILL)
        assert (await made.run(WORKER))[:2] == (True, Exit.USAGE)
        assert made.pids == [waiting.pid]


async def test_what_a_dead_worker_leaves_is_reaped(tmp_path: Path) -> None:
    async with forks(tmp_path):
        await asyncio.sleep(0)  # from here on orphans are this process's children
        script = "sh -c 'exit 3' & sh -c 'sleep 0.2; exit 4' & echo $$; kill -9 $$"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, start_new_session=True)
        leader = int(done.stdout)
        async with asyncio.timeout(10):
            while reap_strays(leader):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.02)
        with pytest.raises(ChildProcessError):
            os.waitid(os.P_PGID, leader, os.WEXITED | os.WNOHANG)


HELPED = """
    import os, resource, subprocess, sys
    from pathlib import Path
    sys.path.append(sys.argv[1])
    os.environ["PADDOCK_WORKER_SECRET"] = "never told"
    from workers.forkserver.helpers import HelpersAhead
    from workers.process.helper_process import HelperProcess
    ahead = HelpersAhead.forked(1)
    core = os.sched_getaffinity(0).pop()
    os.sched_setaffinity(0, [core])
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    Path("/proc/self/oom_score_adj").write_text("321")
    forked, started = (HelperProcess("tests.support.echoing_helper", start_s=30.0, launch=ahead.launch) for _ in "12")
    room = bytearray(3)
    for helper in (forked, started):
        assert helper.ask(b"2 3 echo", 10.0, attached=b"ab", room=lambda line: memoryview(room)) == b"3", room
        assert room == b"aba"
    assert os.getpgid(forked.pid) == os.getpgid(0)
    assert len(os.listdir(f"/proc/{forked.pid}/fd")) == 3, os.listdir(f"/proc/{forked.pid}/fd")
    assert os.sched_getaffinity(forked.pid) == {core}
    assert resource.prlimit(forked.pid, resource.RLIMIT_CORE) == (1, 1)
    assert Path(f"/proc/{forked.pid}/oom_score_adj").read_text() == "321\\n"
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert str(forked.pid) in children
    pid = forked.pid
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert forked.ask(b"0 1 echo", 10.0) == b"1"
    assert forked.pid != pid
    forked.close()
    started.close()
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    Path(sys.argv[1], "telling.py").write_text("import os; print(sorted(os.environ))")
    telling = HelpersAhead.forked(1).launch([sys.executable, "-m", "telling"], stdout=subprocess.PIPE)
    told = telling.stdout.read()
    assert telling.wait() == 0
    assert b"PATH" in told and b"PADDOCK" not in told, told
    print("all well")
"""


def test_helpers_that_were_forked_ahead_do_as_started_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HELPED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout == "all well\n", done.stderr
