"""Keeps one child process running: starts it, watches it, restarts it when it dies, stops it with its process group.

Whether a dead process is restarted depends on its exit code, by the rules of `workers.protocol.exits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from workers.process.signals import RESERVED_BY
from workers.protocol.exits import FINAL, Exit
from workers.supervisor.output import Output
from workers.supervisor.processes import (
    NotStarted,
    Process,
    Recipe,
    Start,
    describe,
    signal_group,
    started,
    wait_for_strays,
)

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0
STABLE_S = 60.0
RENEWED_LOOK_S = 0.02
LINE_LIMIT = 1 << 20

SHORTAGES = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Error numbers that mean a process can't be started just now: memory, processes or file descriptors are short."""

ENDED_AS_ASKED = frozenset({Exit.OK, Exit.DRAIN_CUT})


@dataclass(slots=True)
class Backoff:
    """Computes the wait before the next start. It doubles each time; a process that ran `stable_s` resets it."""

    first_s: float = FIRST_DELAY_S
    longest_s: float = LONGEST_DELAY_S
    stable_s: float = STABLE_S
    _next_s: float = field(default=0.0, init=False)

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after a process that lived `lived_s` seconds."""
        if lived_s >= self.stable_s or not self._next_s:
            self._next_s = self.first_s
        delay, self._next_s = self._next_s, min(self._next_s * 2, self.longest_s)
        return delay


async def ignore_death(code: int, is_final: bool) -> None:
    """Do nothing: the default `on_death` of `Child`."""


async def prepare_nothing() -> None:
    """Do nothing: the default `prepare` of `Child`."""


def always_prepared() -> bool:
    """Return True: the default `is_prepared` of `Child`."""
    return True


class Child:
    """Keeps the process of one recipe running. `keep` returns when an exit code forbids a restart, or after `stop`."""

    def __init__(
        self,
        recipe: Recipe,
        output: Output,
        *,
        on_death: Callable[[int, bool], Awaitable[None]] = ignore_death,
        prepare: Callable[[], Awaitable[None]] = prepare_nothing,
        is_prepared: Callable[[], bool] = always_prepared,
        final: Collection[int] = FINAL,
        backoff: Backoff | None = None,
        start: Start = started,
    ) -> None:
        """`on_death(code, is_final)` is called when the process ends unasked; `is_final`: it will not be restarted.

        `prepare` makes the files that the process reads; it is awaited before each start, which is tried again later if
        it raises OSError or RuntimeError. `is_prepared` returns whether these files are there; it never raises.

        A process that ends with a code in `final` stays ended, unless the cause may pass: somebody has removed what
        `prepare` made, or an earlier process ran for a minute and ended with another code (a full disk, short memory).
        After `ENDED_AS_ASKED` none is restarted. `start` starts the process."""
        self._start = start
        self.name = recipe.name
        self.starts = 0
        self.pid: int | None = None
        """Process id of the running process; None: none runs."""
        self.last_code: int | None = None
        """Exit code of the process that ended last."""
        self._recipe = recipe
        self._output = output
        self._on_death = on_death
        self._prepare = prepare
        self._is_prepared = is_prepared
        self._final = final
        self._backoff = backoff or Backoff()
        self._can_run = False
        """Whether a process of this recipe ran for a minute and then ended with a code that is not final."""
        self._stopping = asyncio.Event()
        self._renewing = asyncio.Event()
        """Set while a process is being replaced."""
        self._hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def keep(self) -> int:
        """Keep the process running; return its last exit code (negative: a signal). Cancelling kills its group."""
        self._idle.clear()
        code = 0
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                try:
                    code = self.last_code = await self._live()
                except NotStarted as error:
                    await self._pause(f"can't be started ({error})", self._backoff.after(0.0))
                    continue
                if self._stopping.is_set():
                    break
                if self._renewing.is_set():
                    self._renewing.clear()
                    continue
                lived_s = time.monotonic() - started
                is_final = self._is_final(code, lived_s)
                await self._on_death(code, is_final)
                if is_final:
                    break
                if code == Exit.DRAINED:
                    self._output.note(f"paddock: {self.name} has drained, as an admin asked, and is started again")
                    continue
                for line in self._output.recent():
                    self._output.note(f"{self.name} | {line}")
                await self._pause(f"died ({describe(code)})", self._backoff.after(lived_s))
            return code
        finally:
            self._output.close()
            self._idle.set()

    async def renew(self) -> None:
        """Send SIGUSR1, upon which the process ends, killed after the recipe's `grace_s`, and start another. Return
        when it is started, or when `keep` is over. Nothing happens while no process runs."""
        if self.pid is None:
            return
        starts = self.starts
        self._renewing.set()
        while self.starts == starts and not self._idle.is_set():  # noqa: ASYNC110 - it takes seconds
            await asyncio.sleep(RENEWED_LOOK_S)

    def leave(self) -> None:
        """Begin to stop the process as `stop` does, without waiting for its end."""
        self._stopping.set()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the recipe's `grace_s`; return when `keep` is over. Idempotent."""
        self._stopping.set()
        await self._idle.wait()

    def reserve(self, reserved: bool) -> None:
        """Have a worker that has registered get no new calls, or get calls again. A younger process would end of it."""
        if self.pid is not None:
            number = next(number for number, meaning in RESERVED_BY.items() if meaning == reserved)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def hurry(self) -> None:
        """Kill a process that is being stopped, without waiting for the rest of `grace_s`."""
        self._hurried.set()

    def _is_final(self, code: int, lived_s: float) -> bool:
        if code in self._final:
            return code in ENDED_AS_ASKED or (not self._can_run and self._is_prepared())
        self._can_run = self._can_run or lived_s >= self._backoff.stable_s
        return False

    async def _pause(self, why: str, delay_s: float) -> None:
        self._output.note(f"paddock: {self.name} {why}; starting it again in {delay_s:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()

    async def _live(self) -> int:
        """Run one process to its end; return its exit code. Raises NotStarted; OSError if it can never be started."""
        try:
            await self._prepare()
        except (OSError, RuntimeError) as error:
            raise NotStarted(str(error)) from error
        try:
            process, read_end = await self._begin()
        except RuntimeError as error:  # no thread could be started to wait for the process
            raise NotStarted(str(error)) from error
        except OSError as error:
            if not self.starts and error.errno not in SHORTAGES:
                raise
            raise NotStarted(error.strerror) from error
        self.pid, self.starts = process.pid, self.starts + 1
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(read_end))
                try:
                    return await self._end_of(process, tasks)
                finally:
                    signal_group(process.pid, signal.SIGKILL)
                    await asyncio.wait({reader}, timeout=1.0)
                    reader.cancel()
        finally:
            # So no zombie and no open transport is left, even if `keep` is cancelled.
            await _killed(process)
            await wait_for_strays(process.pid)
            self.pid = None

    async def _begin(self) -> tuple[Process, int]:
        """Start a process; return it and the descriptor from which its output is read."""
        read_end, write_end = os.pipe()
        try:
            # Not asyncio's own pipe: its wait() would also wait for grandchildren that hold the pipe open.
            return await self._start(self._recipe, write_end), read_end
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)

    async def _end_of(self, process: Process, tasks: asyncio.TaskGroup) -> int:
        ended = tasks.create_task(process.wait())
        asked = tasks.create_task(self._stopping.wait())
        renewing = tasks.create_task(self._renewing.wait())
        hurried = tasks.create_task(self._hurried.wait())
        try:
            await asyncio.wait({ended, asked, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not asked.done():
                signal_group(process.pid, signal.SIGUSR1)
                await asyncio.wait({ended, asked}, timeout=self._recipe.grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                signal_group(process.pid, signal.SIGTERM)
                grace_s = self._recipe.grace_s if asked.done() else 0.0
                await asyncio.wait({ended, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._output.note(f"paddock: {self.name} did not stop in time and is killed")
            return process.returncode if process.returncode is not None else await _killed(process)
        finally:
            if process.returncode is None:
                signal_group(process.pid, signal.SIGKILL)
            for task in (asked, renewing, hurried):
                task.cancel()

    async def _read(self, read_end: int) -> None:
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            while line := await _next_line(reader):
                self._output.line(line)
        finally:
            transport.close()


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        return await reader.read(LINE_LIMIT)


async def _killed(process: Process) -> int:
    if process.returncode is None:
        signal_group(process.pid, signal.SIGKILL)
    return await process.wait()


class WorkerSlot:
    """One worker's place on this machine; it is empty while the worker's model is unloaded. `keep` runs until `stop` is
    called, or until the worker's exit code forbids to restart it."""

    def __init__(self, make: Callable[[], Child]) -> None:
        """`make` returns a new child that runs the worker."""
        self._make = make
        self._child: Child | None = None
        self._wanted = True
        self._sent_away = False
        """Whether the child was told to stop because no worker is wanted here, and has not ended yet."""
        self._stopping = False
        self._go = asyncio.Event()
        self._go.set()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def is_wanted(self) -> bool:
        """Whether a worker should run here."""
        return self._wanted

    def want(self, wanted: bool) -> None:
        """Set whether a worker should run here, without waiting. An unwanted worker drains before another starts."""
        if wanted == self._wanted or self._stopping:
            return
        self._wanted = wanted
        if wanted:
            self._go.set()
            return
        self._go.clear()
        if self._child is not None:
            self._sent_away = True
            self._child.leave()

    async def keep(self) -> int:
        """Keep a worker running while one is wanted; return the last exit code (negative: a signal)."""
        code = int(Exit.OK)
        while True:
            await self._go.wait()
            if self._stopping:
                return code
            self._child = self._make()
            code = await self._child.keep()
            if self._stopping or not self._sent_away:
                return code
            self._sent_away, self._child = False, None

    async def replace(self, make: Callable[[], Child]) -> None:
        """Drain the worker, and then run the child that `make` returns; return when the worker is gone. If none is
        wanted now, the next one will be such a child."""
        self._make = make
        if self._child is not None and not self._stopping:
            self._sent_away = True
            await self._child.stop()

    async def stop(self) -> None:
        """Drain and stop the worker within its `grace_s`; return when it is gone."""
        self._stopping = True
        self._go.set()
        if self._child is not None:
            await self._child.stop()

    def reserve(self, reserved: bool) -> None:
        """Have the worker, which has registered, get no new calls, or get calls again."""
        if self._child is not None:
            self._child.reserve(reserved)

    def hurry(self) -> None:
        if self._child is not None:
            self._child.hurry()
