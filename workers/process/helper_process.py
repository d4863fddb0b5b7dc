"""Runs work that may hang, crash or take too much memory in a helper process. The helper answers each line (a question)
with one line, is killed when it takes too long, and is started again when it is needed again. Bytes may follow either
line: they travel as they are, and reach memory that the asking thread has made for them.

The helper is a Python module that reads standard input to its end, and writes one line when it is ready and one per
question (`workers.process.limits` has the limits that it should set first). It gets none of the worker's secrets: its
environment has only what Python needs to start.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

ROOT = Path(__file__).parents[2]
"""The folder that contains the package `workers`."""

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "TMPDIR")

END_S = 2.0
"""Seconds that a helper process has to end by itself after it has closed a pipe; then it is killed."""

CHUNK_BYTES = 256 << 10

Room = Callable[[bytes], memoryview]
"""Returns the memory for the bytes that follow an answer's line, given this line: as many of them as will come."""


class Process(Protocol):
    """A helper process as `subprocess.Popen` has it: started as a program, or forked (`workers.forkserver.helpers`)."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Launch(Protocol):
    """Starts a helper process, as `launched` does."""

    def __call__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        bufsize: int = 0,
    ) -> Process: ...


OUTSIDERS = frozenset({signal.SIGKILL.name, signal.SIGTERM.name, signal.SIGINT.name, signal.SIGHUP.name})
"""Names of signals that come from another process, or from the kernel for want of memory: no fault of the helper."""


class TookTooLong(Exception):
    """The helper did not answer in time, and has been killed.

    `starved`: it got hardly any processor time, because it was stopped or the machine is busy; so the question is not
    the cause."""

    def __init__(self, *, starved: bool = False) -> None:
        super().__init__()
        self.starved = starved


class ProcessEnded(Exception):
    """The helper ended instead of answering; the message says how, as `ending` returns it."""

    @property
    def killed(self) -> bool:
        """Whether another process or the kernel (short of memory) killed the helper."""
        return str(self) in OUTSIDERS


class NotStarted(Exception):
    """The helper ended or was killed before its first line; the message says why."""


STARVED_SHARE = 0.1
"""Minimum processor time of a process, as a share of the time waited for it; with less it counts as starved."""


def processor_s(pid: int) -> float:
    """Return the processor seconds that a process has used so far; NaN if they are unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return math.nan


def is_starved(pid: int, before_s: float, seconds: float) -> bool:
    """Return whether a process got hardly any processor time in the last `seconds`; False for less than one second.

    `before_s`: its `processor_s` at the beginning of these seconds."""
    return seconds >= 1 and processor_s(pid) - before_s < STARVED_SHARE * seconds


def ending(code: int) -> str:
    """Return how a process ended, by its exit code: the name of the signal, or the code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def launched(
    command: Sequence[str], *, variables: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[bytes]:
    """Return a new process, made by `subprocess.Popen` with `how`, that gets none of the worker's secrets.

    `variables`: variables to add to its environment.

    Raises NotStarted. If memory is short, raises OSError (ENOMEM) instead, which a worker reports in its own way."""
    try:
        environment = {**helper_environment(), **(variables or {})}
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, **how)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise NotStarted(error.strerror) from None


def helper_environment() -> dict[str, str]:
    """Return the environment of a helper process, without any secret of the worker's."""
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    # A helper needs neither a GPU nor thread pools, and both take memory.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # Without this ggml starts a debugger when it aborts, which takes seconds.
    environment["GGML_NO_BACKTRACE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return environment


class HelperProcess:
    """One helper process and its successors. Several threads can use it; it is asked one question at a time."""

    def __init__(self, module: str, *args: str, start_s: float, launch: Launch = launched) -> None:
        """`module`: Python module to run when it is first needed. `start_s`: maximum seconds until its first line."""
        self._launch = launch
        self._command = [sys.executable, "-m", module, *args]
        self._start_s = start_s
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._opening: Sequence[bytes] = ()
        self._greeting = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, *opening: bytes) -> bytes:
        """Start a new process now and return its first line. `opening`: lines to send it first. Raises NotStarted."""
        with self._lock:
            self._end()
            self._opening = opening
            self._running()
            return self._greeting

    def restart(self) -> None:
        """Start the process again if it has ended, with the same opening lines. Raises NotStarted."""
        with self._lock:
            self._running()

    def tell_successors(self, *opening: bytes) -> None:
        """Set the opening lines for processes that are started from now on; the present one is not told."""
        with self._lock:
            self._opening = opening

    def ask(self, question: bytes, timeout_s: float, *, attached: bytes = b"", room: Room | None = None) -> bytes:
        """Send one line and return the answer, both without line ends. Starts a process if none runs.

        `attached`: bytes that follow the line. `room`: called once with the answer; what it returns is filled with the
        bytes that follow that. If it raises, the process is ended, and the error is the caller's.

        Blocks while other callers' questions are answered and during a start. Raises NotStarted, TookTooLong,
        ProcessEnded."""
        with self._lock:
            process = self._running()
            return self._answer(process, (question + b"\n", attached), timeout_s, room)

    def close(self) -> None:
        """Kill the process; a later `ask` starts another one."""
        with self._lock:
            self._end()

    def _running(self) -> Process:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = process = self._new()
            opening = b"".join(line + b"\n" for line in self._opening)
            try:
                self._greeting = self._answer(process, (opening,), self._start_s)
            except TookTooLong:
                raise NotStarted(f"not ready within {self._start_s:g} s") from None
            except ProcessEnded as ended:
                raise NotStarted(str(ended)) from None
            return process
        return self._process

    def _new(self) -> Process:
        process = self._launch(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None  # noqa: S101 - for the type checker
            os.set_blocking(pipe.fileno(), False)
        return process

    def _answer(
        self,
        process: Process,
        question: Sequence[bytes],
        timeout_s: float,
        room: Room | None = None,
    ) -> bytes:
        before_s = processor_s(process.pid)
        try:
            return _exchanged(process, question, _Answer(room), time.monotonic() + timeout_s)
        except TookTooLong:
            starved = is_starved(process.pid, before_s, timeout_s)
            self._end()
            raise TookTooLong(starved=starved) from None
        except EOFError:
            self._end(END_S)
            raise ProcessEnded(ending(process.wait())) from None
        except BaseException:
            # Whatever went wrong: a late answer would be taken for the answer to the next caller's question.
            self._end()
            raise

    def _end(self, grace_s: float = 0.0) -> None:
        """Kill the process, after `grace_s` seconds in which it can end by itself with its own exit code."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class _Answer:
    """An answer while it comes: a line, then the bytes that there is room for."""

    def __init__(self, room: Room | None) -> None:
        self._room = room
        self._parts: list[bytes] = []
        self._left = memoryview(b"")
        """Memory that is still to be filled."""
        self.line: bytes | None = None
        """The line without its end; None until it is whole."""

    @property
    def is_whole(self) -> bool:
        return self.line is not None and not self._left

    def read(self, reader: int) -> None:
        """Read what is there, CHUNK_BYTES at most. Raises EOFError if it has ended, and what `room` raises."""
        if self.line is not None:
            num_bytes = os.readv(reader, [self._left[:CHUNK_BYTES]])
            if not num_bytes:
                raise EOFError
            self._left = self._left[num_bytes:]
            return
        part = os.read(reader, CHUNK_BYTES)
        if not part:
            raise EOFError
        end = part.find(b"\n")
        if end < 0:
            self._parts.append(part)
            return
        self.line = b"".join([*self._parts, part[:end]])
        if self._room is not None:
            self._left = self._room(self.line)
            if first := part[end + 1 :][: len(self._left)]:
                self._left[: len(first)] = first
                self._left = self._left[len(first) :]


def _exchanged(process: Process, question: Sequence[bytes], answer: _Answer, deadline: float) -> bytes:
    """Send the question, read the answer and return its line. Raises TookTooLong, EOFError if the process closes a
    pipe, and what the answer's `room` raises."""
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    writer, reader = process.stdin.fileno(), process.stdout.fileno()
    waiting = [memoryview(part) for part in question if part]
    events = select.poll()  # unlike `select`, it takes descriptors above 1023
    events.register(reader, select.POLLIN)
    if waiting:
        events.register(writer, select.POLLOUT)
    while not answer.is_whole:
        left = deadline - time.monotonic()
        ready = dict(events.poll(left * 1e3)) if left > 0 else {}
        if not ready:
            raise TookTooLong
        try:
            if writer in ready:
                waiting[0] = waiting[0][os.write(writer, waiting[0][:CHUNK_BYTES]) :]
                if not waiting[0]:
                    del waiting[0]
                if not waiting:
                    events.unregister(writer)
            if reader in ready:
                answer.read(reader)
        except BrokenPipeError:
            raise EOFError from None
    assert answer.line is not None  # noqa: S101 - for the type checker
    return answer.line
