"""A process of one's own for work that may hang, crash or eat memory: it answers a line for each line it is asked, is
killed when it takes too long, and started anew when it is needed again.

The other end is a Python module that reads standard input until that ends, and writes one line when it is ready and one
per question (`workers.bounds` has what it should do to itself first). It gets none of the worker's secrets: of the
environment, only what Python needs to start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
"""Where the package `workers` lies."""

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "TMPDIR")

END_S = 2.0
"""A process that closed its pipe is gone soon."""

CHUNK_BYTES = 256 << 10

Process = subprocess.Popen[bytes]

OUTSIDERS = frozenset({signal.SIGKILL.name, signal.SIGTERM.name, signal.SIGINT.name, signal.SIGHUP.name})
"""Signals that no bound and no crash of a process sends: somebody else does, the kernel where memory is short."""


class TookTooLong(Exception):
    """No answer in time; the process has been killed."""


class ProcessEnded(Exception):
    """It ended instead of answering; the message says how, as `ending` has it."""

    @property
    def killed(self) -> bool:
        """Return whether somebody else killed it: the kernel does where memory is short."""
        return str(self) in OUTSIDERS


class NotStarted(Exception):
    """It did not come to its first line; the message says why."""


def ending(code: int) -> str:
    """Return how a process ended, by its exit code: the name of the signal, or the code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def launched(command: Sequence[str], *, variables: Mapping[str, str] | None = None, **how: Any) -> Process:
    """Return a new process, as `subprocess.Popen` makes it, that gets none of the worker's secrets.

    `variables`: what its environment has beside.

    Raises NotStarted; OSError (ENOMEM) where memory is short, which a worker tells of in a way of its own.
    """
    try:
        environment = {**helper_environment(), **(variables or {})}
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, **how)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise NotStarted(error.strerror) from None


def helper_environment() -> dict[str, str]:
    """Return what such a process gets of the environment: no secret of the worker's."""
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    # No GPU and no pool of threads: none of them is needed, and each takes memory.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # Else ggml starts a debugger where it aborts, which takes seconds.
    environment["GGML_NO_BACKTRACE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return environment


class StoppableProcess:
    """May be used from several threads; one question at a time."""

    def __init__(self, module: str, *args: str, start_s: float) -> None:
        """`module`: what is run, when it is first needed. `start_s`: longest from its start to its first line."""
        self._command = [sys.executable, "-m", module, *args]
        self._start_s = start_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._opening: Sequence[bytes] = ()
        self._greeting = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, *opening: bytes) -> bytes:
        """Starts it now; -> its first line. `opening`: lines that it is told at once. Raises NotStarted."""
        with self._lock:
            self._end()
            self._opening = opening
            self._running()
            return self._greeting

    def restart(self) -> None:
        """Start it anew if it has ended; what it is told first stays the same. Raises NotStarted."""
        with self._lock:
            self._running()

    def tell_successors(self, *opening: bytes) -> None:
        """What a process that follows this one is told at once, in place of what this one was."""
        with self._lock:
            self._opening = opening

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """One line for one line, both without their ends. Blocks, behind others who ask, and while a process starts.

        Raises NotStarted, TookTooLong, ProcessEnded.
        """
        with self._lock:
            process = self._running()
            return self._answer(process, question + b"\n", timeout_s)

    def close(self) -> None:
        """Ends the process; a later `ask` starts another."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = process = self._new()
            opening = b"".join(line + b"\n" for line in self._opening)
            try:
                self._greeting = self._answer(process, opening, self._start_s)
            except TookTooLong:
                raise NotStarted(f"not ready within {self._start_s:g} s") from None
            except ProcessEnded as ended:
                raise NotStarted(str(ended)) from None
            return process
        return self._process

    def _new(self) -> subprocess.Popen[bytes]:
        process = launched(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None  # noqa: S101 - for the type checker
            os.set_blocking(pipe.fileno(), False)
        return process

    def _answer(self, process: subprocess.Popen[bytes], question: bytes, timeout_s: float) -> bytes:
        try:
            return _exchanged(process, question, time.monotonic() + timeout_s)
        except EOFError:
            self._end(END_S)
            raise ProcessEnded(ending(process.returncode)) from None
        except BaseException:
            # Whatever it was: an answer that still comes would be taken for that to the next question, of another.
            self._end()
            raise

    def _end(self, grace_s: float = 0.0) -> None:
        """`grace_s`: for a process that ends by itself, so that its own exit code is seen."""
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


def _exchanged(process: subprocess.Popen[bytes], question: bytes, deadline: float) -> bytes:
    """The line that follows. Raises TookTooLong, and EOFError when the process closes a pipe."""
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    writer, reader = process.stdin.fileno(), process.stdout.fileno()
    waiting = memoryview(question)
    parts: list[bytes] = []
    events = select.poll()  # unlike `select`, it knows descriptors above 1023
    events.register(reader, select.POLLIN)
    events.register(writer, select.POLLOUT)
    while not parts or not parts[-1].endswith(b"\n"):
        left = deadline - time.monotonic()
        ready = dict(events.poll(left * 1e3)) if left > 0 else {}
        if not ready:
            raise TookTooLong
        try:
            if writer in ready:
                waiting = waiting[os.write(writer, waiting[:CHUNK_BYTES]) :]
                if not waiting:
                    events.unregister(writer)
            if reader in ready:
                parts.append(os.read(reader, CHUNK_BYTES))
        except BrokenPipeError:
            raise EOFError from None
        if parts and not parts[-1]:
            raise EOFError
    return b"".join(parts)[:-1]
