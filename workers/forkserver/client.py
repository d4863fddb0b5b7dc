"""Keeps the process that forks workers running, and asks it for workers, in a supervisor on Linux.

Orders wait in a socket whose both ends the supervisor holds, so that they survive the process that takes them. Where
workers come and go, one that has no identity yet is forked ahead: the next one begins to load its model at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from workers.forkserver.messages import DESCRIPTOR, ORDER, OUTPUT, PID_BYTES, Birth
from workers.process import parent_death
from workers.sources import PREFIX
from workers.supervisor.child import Child
from workers.supervisor.output import Console, Output
from workers.supervisor.processes import (
    NotStarted,
    Process,
    Recipe,
    exit_code,
    reap_strays,
    signal_group,
    started,
    wait_for_end,
)

NAME = "forkserver"
PR_SET_CHILD_SUBREAPER = 36

START_S = 60.0
"""Maximum seconds until a process is there that was asked for. It takes milliseconds, once libraries are loaded; what
takes longer is killed, and started again."""
ATTEMPTS = 3
"""Number of times that a worker is asked for; then it is started as a program. The process that forks may just die."""
AHEAD_AFTER_S = 1.0
"""Seconds after a start at which a process is forked ahead: the worker that was started has the processor meanwhile."""
STRAYS_EVERY_S = 10.0
GRACE_S = 1.0

CAN_FORK = sys.platform == "linux"
"""Whether a process can become another's child (prctl(2), PR_SET_CHILD_SUBREAPER)."""

READ_LATE = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", parent_death.VARIABLE})
"""Variables that no library reads before llama.cpp's backends start, so that a forked process may have its own."""


class ForkedProcess:
    """A forked worker, which is this process's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Wait for the end; return the exit code, or the negative number of the signal."""
        while self.returncode is None:
            await wait_for_end(self.pid)
            if self.returncode is None:  # nobody else who waits was faster
                self.returncode = exit_code(self.pid)
        return self.returncode


@dataclass(frozen=True, slots=True)
class _Newborn:
    """A forked process that has no identity yet."""

    pid: int
    life: socket.socket
    """The private socket, over which it gets one. The process ends when this is closed before."""

    def has_ended(self) -> bool:
        """Return whether somebody has killed it: it does not end by itself while it waits."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def end(self) -> None:
        """End it, with its helper processes, and forget it."""
        self.life.close()
        signal_group(self.pid, signal.SIGKILL)
        exit_code(self.pid)


class ForkServer:
    """The process that forks workers. `keep` runs it; `start` has it fork one."""

    def __init__(
        self, folder: Path, console: Console, environment: Mapping[str, str], *, forks_ahead: bool = False
    ) -> None:
        """`folder`: where its log goes. `environment`: the supervisor's own; it gets what Paddock does not read.
        `forks_ahead`: whether a forked process waits for its identity once a worker was started."""
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._environment = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
        added = {DESCRIPTOR: str(self._theirs.fileno()), "OPENBLAS_NUM_THREADS": "1"}
        argv = (sys.executable, "-m", "workers.forkserver")
        output = Output(NAME, folder, console)
        self._log = output.path
        recipe = Recipe(NAME, argv, self._environment | added, GRACE_S, (self._theirs.fileno(),))
        self._child = Child(recipe, output, on_death=self._note_death, final=frozenset())
        self._console = console
        self._can_adopt = True
        """Whether forked processes become this process's children."""
        self._died = asyncio.Event()
        self._forked: set[int] = set()
        """Process ids of the workers that run."""
        self._forks_ahead = forks_ahead
        self._ahead: _Newborn | None = None
        self._used = asyncio.Event()
        """Set when a worker was started, and at first."""
        self._used.set()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def keep(self) -> None:
        """Keep the process running until cancelled."""
        self._can_adopt = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._child.keep())
                tasks.create_task(self._reap_strays())
                if self._forks_ahead:
                    tasks.create_task(self._keep_ahead())
        finally:
            self._ours.close()
            self._theirs.close()

    async def start(self, recipe: Recipe, output: int) -> Process:
        """Return a new process for the recipe, whose output goes to the descriptor `output`. Where none can be forked,
        start a program. Raises NotStarted, OSError."""
        if self._fits(recipe):
            self._used.set()
            for _ in range(ATTEMPTS):
                newborn = self._taken_ahead() or await self._fork()
                if newborn is not None:
                    await self._name(newborn, recipe, output)
                    self._forked.add(newborn.pid)
                    return ForkedProcess(newborn.pid)
            self._drop_orders()
            why = f"no process can be forked; see {self._log}"
            self._console.say(f"paddock: {recipe.name} is started as a program: {why}")
        return await started(recipe, output)

    def _fits(self, recipe: Recipe) -> bool:
        """Return whether the recipe's process can be a fork: what libraries read when they are loaded is the same."""
        own = {name: value for name, value in recipe.environment.items() if not name.startswith(PREFIX)}
        other = self._environment.items() ^ own.items()
        return self._can_adopt and not recipe.descriptors and {name for name, _ in other} <= READ_LATE

    async def _keep_ahead(self) -> None:
        """Have a process forked ahead some time after each start, until cancelled; then end the one that waits."""
        try:
            while True:
                await self._used.wait()
                self._used.clear()
                await asyncio.sleep(AHEAD_AFTER_S)
                if self._ahead is None and not self._used.is_set():
                    with suppress(NotStarted):  # the next worker finds out, too
                        self._ahead = await self._fork()
        finally:
            if (newborn := self._taken_ahead()) is not None:
                newborn.end()

    def _taken_ahead(self) -> _Newborn | None:
        """Return the process that was forked ahead, which belongs to the caller then; None: there is none."""
        newborn, self._ahead = self._ahead, None
        if newborn is not None and newborn.has_ended():
            newborn.end()
            return None
        return newborn

    async def _fork(self) -> _Newborn | None:
        """Return a process without identity; None: none was forked. Raises NotStarted."""
        try:
            life, theirs = socket.socketpair()
        except OSError as error:
            raise NotStarted(error.strerror) from None
        pid = 0
        try:
            with theirs:
                await self._order(theirs.fileno())
            life.setblocking(False)
            self._died.clear()
            dying = asyncio.create_task(self._died.wait())
            being_born = asyncio.create_task(_told(life))
            try:
                done, _ = await asyncio.wait({dying, being_born}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
                pid = being_born.result() if being_born in done else 0
                if not done and self._child.pid is not None:  # it stands still
                    signal_group(self._child.pid, signal.SIGKILL)
            finally:
                for task in (dying, being_born):
                    task.cancel()
            return _Newborn(pid, life) if pid else None
        finally:
            if not pid:
                life.close()

    async def _name(self, newborn: _Newborn, recipe: Recipe, output: int) -> None:
        """Give a process its identity, the recipe's, and the descriptor for its output."""
        environment = {**recipe.environment, parent_death.VARIABLE: str(os.getpid())}
        birth = msgspec.msgpack.encode(Birth(name=recipe.name, environment=environment))
        try:
            socket.send_fds(newborn.life, [OUTPUT], [output])
            await asyncio.get_running_loop().sock_sendall(newborn.life, birth)
        except OSError:  # it has been killed, as its exit code will say
            pass
        except BaseException:
            newborn.end()
            raise
        newborn.life.close()

    async def _order(self, private: int) -> None:
        """Ask for a process with this socket. Raises NotStarted."""
        try:
            socket.send_fds(self._ours, [ORDER], [private])
        except OSError as error:  # thousands of orders wait, or no descriptors are left
            raise NotStarted(error.strerror) from None

    def _drop_orders(self) -> None:
        """Drop the orders that nobody takes: they hold descriptors. A start that still waits for one fails, and is
        tried again."""
        room = socket.CMSG_LEN(array("i").itemsize)
        while True:
            try:  # not `recv_fds`, which drops its flags before Python 3.12
                _, told, _, _ = self._theirs.recvmsg(len(ORDER), room, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            for _, _, ends in told:
                for end in array("i", ends):
                    os.close(end)

    async def _note_death(self, code: int, is_final: bool) -> None:
        self._died.set()

    async def _reap_strays(self) -> None:
        """Take the exit codes of what workers' helper processes have left behind, until cancelled."""
        while True:
            await asyncio.sleep(STRAYS_EVERY_S)
            self._forked = {pid for pid in self._forked if reap_strays(pid)}


async def _told(life: socket.socket) -> int:
    """Return the process id that comes over the socket; 0: it was closed."""
    try:
        told = await asyncio.get_running_loop().sock_recv(life, PID_BYTES)
    except OSError:
        return 0
    return int(told) if told else 0
