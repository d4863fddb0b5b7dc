"""Real processes: kept, restarted, stopped with their whole group, and never outliving their keeper."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.supervisor.conftest import unreadable
from tests.support.process_limits import few_descriptors
from workers.protocol.exits import Exit
from workers.supervisor.child import Backoff, Child
from workers.supervisor.output import Console, Output, Terminal
from workers.supervisor.processes import Recipe, describe
from workers.supervisor.state_folder import StateFolder

STUBBORN = "trap '' TERM; echo started; while :; do sleep 0.05; done"


class Kept:
    """One child under test and what was said about it."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        grace_s: float = 5.0,
        stable_s: float = 60.0,
        needs: Path | None = None,
        state: StateFolder | None = None,
    ) -> None:
        """`needs`: a file that is made before each start, if its folder is there; `state`: what has such files."""
        self.terminal = io.StringIO()
        self.deaths: list[int] = []
        self.is_over = False
        self.output = Output("child", folder, Console("info", partial(print, file=self.terminal)))
        recipe = Recipe("child", ("/bin/sh", "-c", script), dict(os.environ), grace_s)
        backoff = Backoff(first_s=0.02, longest_s=0.1, stable_s=stable_s)
        files: dict[str, Any] = {}
        if needs is not None:

            async def make() -> None:
                await asyncio.to_thread(needs.touch)

            files = {"prepare": make, "is_prepared": needs.exists}
        if state is not None:

            async def restore() -> None:
                await asyncio.to_thread(state.restore)

            files = {"prepare": restore, "is_prepared": state.is_whole}
        self.child = Child(recipe, self.output, on_death=self._died, backoff=backoff, **files)

    async def _died(self, code: int, is_final: bool) -> None:
        self.deaths.append(code)
        self.is_over = is_final

    def log(self) -> str:
        return self.output.path.read_text() if self.output.path.exists() else ""

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not happened():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)


@asynccontextmanager
async def keeping(kept: Kept) -> AsyncIterator[asyncio.Task[int]]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(kept.child.keep())
        try:
            yield task
        finally:
            kept.child.hurry()
            await kept.child.stop()


async def test_a_killed_child_is_back_at_once_and_a_stop_is_final(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "echo up; exec sleep 60")
    async with keeping(kept) as task:
        await kept.until(lambda: kept.child.pid is not None)
        first = kept.child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await kept.until(lambda: kept.child.pid not in (None, first))
        await kept.child.stop()
        assert await task == -signal.SIGTERM
    assert kept.deaths == [-signal.SIGKILL]
    assert kept.child.starts == 2
    assert "child died (SIGKILL); starting it again in 0.02 s" in kept.terminal.getvalue()


async def test_a_child_that_keeps_dying_waits_longer_each_time(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "echo 'why it fails' >&2; exit 1")
    async with keeping(kept):
        await kept.until(lambda: len(kept.deaths) >= 4)
    said = kept.terminal.getvalue()
    assert [said.count(f"again in {delay} s") for delay in ("0.02", "0.04", "0.08")] == [1, 1, 1]
    assert "child | why it fails" in said


async def test_a_child_that_an_admin_had_drained_is_back_at_once(tmp_path: Path) -> None:
    """However often: it is no death after which to wait longer."""
    kept = Kept(tmp_path, f"echo 'its last words' >&2; exit {int(Exit.DRAINED)}")
    async with keeping(kept):
        await kept.until(lambda: len(kept.deaths) >= 4)
    said = kept.terminal.getvalue()
    assert said.count("paddock: child has drained, as an admin asked, and is started again") >= 3
    assert "died" not in said
    assert said.count("its last words") <= kept.child.starts, "its log is not told once more, as that of a crash"
    assert set(kept.deaths[:4]) == {Exit.DRAINED}
    assert not kept.is_over


@pytest.mark.parametrize("code", [Exit.OK, Exit.USAGE, Exit.BAD_MODEL, Exit.PORT_TAKEN])
async def test_final_codes_are_not_restarted(tmp_path: Path, code: Exit) -> None:
    kept = Kept(tmp_path, f"exit {int(code)}")
    async with keeping(kept) as task:
        async with asyncio.timeout(10):
            assert await asyncio.shield(task) == code
    assert (kept.child.starts, kept.deaths) == (1, [code])


async def test_a_file_that_somebody_removes_is_made_again_and_its_lack_is_not_final(tmp_path: Path) -> None:
    needs = tmp_path / "run" / "file"
    kept = Kept(
        tmp_path, f"[ -e {tmp_path}/go ] || rm {needs}; [ -e {needs} ] || exit 2; echo up; exec sleep 60", needs=needs
    )
    async with keeping(kept):
        await kept.until(lambda: f"No such file or directory: '{needs}'" in kept.terminal.getvalue())
        assert kept.child.starts == 0
        needs.parent.mkdir()
        await kept.until(lambda: kept.deaths.count(Exit.USAGE) >= 2)
        (tmp_path / "go").touch()
        await kept.until(lambda: "up" in kept.log())
    assert not kept.is_over


async def test_files_that_can_not_be_looked_at_are_no_reason_to_end(tmp_path: Path) -> None:
    """The look raised, which ended whoever keeps the child, and with it all others."""
    with StateFolder(tmp_path / "state") as folder:
        folder.keep(folder.run / "file", b"content")
        kept = Kept(tmp_path, "echo up; sleep 0.2; exit 2", state=folder)
        async with keeping(kept):
            await kept.until(lambda: kept.child.pid is not None)
            with unreadable(folder.run):
                await kept.until(lambda: kept.deaths == [Exit.USAGE])
                assert not kept.is_over
                await kept.until(lambda: "File name too long" in kept.terminal.getvalue())
            await kept.until(lambda: kept.is_over)
    assert kept.deaths == [Exit.USAGE] * 2


async def test_what_has_run_for_long_is_tried_again_where_it_can_t_run(tmp_path: Path) -> None:
    """The memory that it needs is somebody else's for a while."""
    short = tmp_path / "short"
    script = f"echo up; if [ -e {short} ]; then exit {int(Exit.NO_MEMORY)}; fi; exec sleep 60"
    kept = Kept(tmp_path, script, stable_s=0.2)
    async with keeping(kept):
        await kept.until(lambda: kept.log().count("up") == 1)
        await asyncio.sleep(0.3)
        short.touch()
        assert kept.child.pid is not None
        os.kill(kept.child.pid, signal.SIGKILL)
        await kept.until(lambda: kept.deaths.count(Exit.NO_MEMORY) >= 2)
        short.unlink()
        tries = kept.child.starts
        await kept.until(lambda: kept.child.starts > tries or kept.child.pid is not None)
        await asyncio.sleep(0.3)
        assert kept.child.pid is not None
        assert not kept.is_over


async def test_without_a_descriptor_a_child_is_started_later_and_others_stay(tmp_path: Path) -> None:
    one, other = (Kept(tmp_path, "exec sleep 60") for _ in range(2))
    async with keeping(one), keeping(other):
        await one.until(lambda: one.child.pid is not None and other.child.pid is not None)
        first, neighbour = one.child.pid, other.child.pid
        assert first is not None
        with few_descriptors():
            os.kill(first, signal.SIGKILL)
            await one.until(lambda: one.terminal.getvalue().count("child can't be started (Too many open files)") > 1)
        await one.until(lambda: one.child.pid not in (None, first))
        assert other.child.pid == neighbour


async def test_lines_that_nobody_can_read_end_nobody(tmp_path: Path) -> None:
    """Whatever a child writes: the keeper of one is the keeper of all."""
    program = tmp_path / "deep.py"
    program.write_text("""print('{"a":' + '[' * 100000)\n""")
    kept = Kept(tmp_path, f"{sys.executable} {program}; echo end; exec sleep 60")
    async with keeping(kept):
        await kept.until(lambda: "end" in kept.log())
        assert kept.child.pid is not None
        assert kept.log().count("[") == 100_000


async def test_a_full_disk_costs_lines_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "child.log").symlink_to("/dev/full")
    kept = Kept(tmp_path, "echo one; echo two; exec sleep 60")
    async with keeping(kept) as task:
        await kept.until(lambda: "child | two" in kept.terminal.getvalue())
        assert kept.child.pid is not None
        os.kill(kept.child.pid, signal.SIGKILL)
        await kept.until(lambda: kept.child.starts == 2)
        await kept.child.stop()
        assert await task == -signal.SIGTERM
    assert kept.terminal.getvalue().count("takes no more lines ([Errno 28] No space left on device)") == 1


async def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, STUBBORN, grace_s=0.2)
    async with keeping(kept) as task:
        await kept.until(lambda: "started" in kept.log())
        await kept.child.stop()
        assert await task == -signal.SIGKILL
    assert "did not stop in time and is killed" in kept.terminal.getvalue()


async def test_hurry_ends_the_grace(tmp_path: Path) -> None:
    kept = Kept(tmp_path, STUBBORN, grace_s=60.0)
    async with keeping(kept):
        await kept.until(lambda: "started" in kept.log())
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kept.child.stop())
            await asyncio.sleep(0.05)
            kept.child.hurry()
        assert time.monotonic() - started < 5.0


async def test_the_whole_group_goes(tmp_path: Path) -> None:
    """A grandchild that ignores signals and holds the pipe open goes with its parent, dead or stopped."""
    grandchild = f"{sys.executable} -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)'"
    kept = Kept(tmp_path, f"{grandchild} & echo $!; exec sleep 60")
    async with keeping(kept):
        await kept.until(lambda: kept.log().strip().isdigit())
        pid = int(kept.log())
        assert psutil.pid_exists(pid)
        await kept.child.stop()
        await kept.until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_stop_while_waiting_to_restart(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "exit 1")
    async with keeping(kept) as task:
        await kept.until(lambda: len(kept.deaths) >= 1)
        await kept.child.stop()
        assert await task == 1


async def test_cancellation_leaves_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path, STUBBORN, grace_s=60.0)
    task = asyncio.ensure_future(kept.child.keep())
    await kept.until(lambda: "started" in kept.log())
    pid = kept.child.pid
    assert pid is not None
    task.cancel()
    await asyncio.wait({task})
    assert not psutil.pid_exists(pid), "killed and waited for, not left as a zombie"
    assert kept.child.pid is None


async def test_a_program_that_can_not_be_started_fails_loudly(tmp_path: Path) -> None:
    recipe = Recipe("none", ("/no/such/program",), {}, 1.0)
    with pytest.raises(FileNotFoundError):
        await Child(recipe, Output("none", tmp_path, Console("info", print))).keep()


async def test_long_lines_are_cut_not_lost(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end; exit 0")
    async with keeping(kept) as task:
        await asyncio.shield(task)
    assert kept.log().count("x") == 3_000_000
    assert kept.log().rstrip().endswith("end")


def test_a_child_does_not_outlive_a_killed_keeper(tmp_path: Path) -> None:
    """A program of ours and a foreign one (through parent_death) both end when their keeper is killed."""
    held = str(tmp_path / "held")
    ours = f"from workers.process.parent_death import hold; hold(); import time; open({held!r}, 'w'); time.sleep(60)"
    keeper = f"""
import os, subprocess, sys, time
from workers.process import parent_death
env = {{**os.environ, parent_death.VARIABLE: str(os.getpid())}}
foreign = [sys.executable, "-I", "-S", parent_death.__file__, "sleep", "60"]
for command in (foreign, [sys.executable, "-c", {ours!r}]):
    print(subprocess.Popen(command, env=env, start_new_session=True).pid, end=" ")
print(flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        children = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(children) == 2
    _wait(lambda: (tmp_path / "held").exists() and children[0].name() == "sleep")
    process.kill()
    process.wait()
    _wait(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


def test_exit_codes_in_words() -> None:
    assert [describe(65), describe(-9), describe(-250)] == ["exit code 65", "SIGKILL", "signal 250"]


def _wait(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_terminal_that_takes_nothing_holds_up_nobody(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with Terminal(stderr=write_end) as terminal:
        output = Output("child", tmp_path, Console("info", terminal.say))
        recipe = Recipe("child", ("/bin/sh", "-c", "yes line | head -n 50000"), dict(os.environ), 5.0)
        async with asyncio.timeout(60):
            assert await Child(recipe, output, final=(0,)).keep() == 0
        told = await asyncio.to_thread(os.read, read_end, 4096)
        assert told.startswith(b"child | line\n")
        os.close(read_end)
    os.close(write_end)
    assert output.path.read_text().count("line") == 50_000


async def test_a_child_is_renewed_at_once_and_does_not_count_as_dead(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "trap 'echo leaving; exit 0' USR1; echo up; while :; do sleep 0.02; done")
    async with keeping(kept):
        await kept.until(lambda: "up" in kept.log())
        first = kept.child.pid
        await kept.child.renew()
        assert kept.child.pid not in (None, first)
        assert "leaving" in kept.log()
        assert kept.child.starts == 2
    assert kept.deaths == []


async def test_a_child_that_is_renewed_and_does_not_end_is_killed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "trap '' USR1; " + STUBBORN, grace_s=0.3)
    async with keeping(kept):
        await kept.until(lambda: "started" in kept.log())
        first = kept.child.pid
        await kept.child.renew()
        assert kept.child.pid not in (None, first)
    assert kept.deaths == []


async def test_a_child_that_is_stopped_while_it_is_renewed_is_not_started_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "trap '' USR1; echo up; while :; do sleep 0.02; done")
    async with keeping(kept) as task:
        await kept.until(lambda: "up" in kept.log())
        renewing = asyncio.create_task(kept.child.renew())
        await asyncio.sleep(0.1)
        await kept.child.stop()
        await renewing
        assert await task == -signal.SIGTERM
    assert kept.child.starts == 1


async def test_a_child_inherits_the_descriptors_of_its_recipe_only(tmp_path: Path) -> None:
    named, other = (tmp_path / "named").open("wb"), (tmp_path / "other").open("wb")
    with named, other:
        for file in (named, other):
            os.set_inheritable(file.fileno(), False)
        inherited = "/proc/self/fd/"
        script = f"echo here >{inherited}{named.fileno()}; test -e {inherited}{other.fileno()} && echo leaked; exit 0"
        output = Output("child", tmp_path, Console("info", partial(print, file=io.StringIO())))
        recipe = Recipe("child", ("/bin/sh", "-c", script), dict(os.environ), 5.0, (named.fileno(),))
        assert await Child(recipe, output).keep() == 0
    assert (tmp_path / "named").read_text() == "here\n"
    assert not output.path.exists() or "leaked" not in output.path.read_text()
