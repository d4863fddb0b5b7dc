"""Starts a child process as a program, in a session of its own; waits for processes and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from workers.process import parent_death

UNKNOWN = 255
"""Exit code of a process whose own has been taken by somebody else, as asyncio has it."""
STRAYS_S = 1.0
"""Maximum seconds to wait for the processes of a killed group."""
STRAYS_LOOK_S = 0.005


class NotStarted(Exception):
    """The process could not be started, but a later attempt may succeed; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The command of a process. Secrets are passed in `environment`, since any user of the machine can read `argv`."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    grace_s: float
    """Seconds from SIGTERM to SIGKILL."""
    descriptors: tuple[int, ...] = ()
    """File descriptors that the process inherits, under the same numbers."""


class Process(Protocol):
    """A child process, which leads a process group: started as a program, or forked (`workers.forkserver.client`)."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int:
        """Wait for the end; return the exit code, or the negative number of the signal."""
        ...


class Start(Protocol):
    """Starts a recipe's process, as `started` does."""

    async def __call__(self, recipe: Recipe, output: int) -> Process: ...


async def started(recipe: Recipe, output: int) -> Process:
    """Start the recipe's command; its standard output and error go to the descriptor `output`. Raises OSError, and
    RuntimeError if no thread could be started to wait for the process."""
    return await asyncio.create_subprocess_exec(
        *recipe.argv,
        env={**recipe.environment, parent_death.VARIABLE: str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=recipe.descriptors,
    )


async def wait_for_end(pid: int) -> None:
    """Wait until a child has ended; its exit code is left for `exit_code`."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # an old kernel, or no descriptors are left
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def exit_code(pid: int) -> int:
    """Return the exit code of a child that has ended (negative: a signal), and forget the child."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return UNKNOWN
    return os.waitstatus_to_exitcode(status)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group that this process leads. Nothing happens if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def reap_strays(leader: int) -> bool:
    """Take the exit codes of processes of a group that have become this process's children, as those of a dead parent
    do (`workers.forkserver.client`). Return whether children of this group are left, its leader included."""
    try:
        while (found := os.waitid(os.P_PGID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid == leader:  # others wait for it
                return True
            os.waitpid(found.si_pid, 0)
    except ChildProcessError:
        return False
    return True


async def wait_for_strays(leader: int) -> None:
    """Wait until no process of a killed group is left that is this process's child; `STRAYS_S` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STRAYS_S):
            while reap_strays(leader):  # noqa: ASYNC110 - the system tells of no end of strangers
                await asyncio.sleep(STRAYS_LOOK_S)


def describe(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
