"""Runs work that may hang, crash or eat memory in a helper process. The helper answers one line for each line that it
is asked, is killed when it takes too long, and is started anew when it is needed again.

The helper is a Python module that reads standard input until that ends, and writes one line when it is ready and one
per question (`workers.process.limits` has the limits that it should set first). It gets none of the worker's
secrets: of the environment, only what Python needs to start.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""Folder of the package `workers`."""

KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "TMPDIR")

END_S = 2.0
"""Seconds to wait for the end of a process that closed its pipe."""

CHUNK_BYTES = 256 << 10

Process = subprocess.Popen[bytes]

OUTSIDERS = frozenset({signal.SIGKILL.name, signal.SIGTERM.name, signal.SIGINT.name, signal.SIGHUP.name})
"""Signals that no limit and no crash of a process raises: somebody else sends them, or the kernel, short of memory."""


class TookTooLong(Exception):
    """The helper did not answer in time, and has been killed.

    `starved`: it had hardly any processor time, as somebody stopped it or the machine is busy: no question is to blame.
    """

    def __init__(self, *, starved: bool = False) -> None:
        super().__init__()
        self.starved = starved


class ProcessEnded(Exception):
    """The helper ended instead of answering; the message says how, as `ending` returns it."""

    @property
    def killed(self) -> bool:
        """Return whether somebody else killed it, such as the kernel where memory is short."""
        return str(self) in OUTSIDERS


class NotStarted(Exception):
    """The helper ended or was killed before its first line; the message says why."""


STARVED_SHARE = 0.1
"""Share of the time for an answer, below which a process has had no processor to work with."""


def processor_s(pid: int) -> float:
    """Return the processor seconds that a process has taken so far; not a number where that can't be told."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return math.nan


def is_starved(pid: int, before_s: float, seconds: float) -> bool:
    """Return whether a process has hardly worked for `seconds`, before which it had taken `before_s`.

    Less than a second tells nothing.
    """
    return seconds >= 1 and processor_s(pid) - before_s < STARVED_SHARE * seconds


def ending(code: int) -> str:
    """Return how a process ended, by its exit code: the name of the signal, or the code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def launched(command: Sequence[str], *, variables: Mapping[str, str] | None = None, **how: Any) -> Process:
    """Return a new process, as `subprocess.Popen` makes it, that gets none of the worker's secrets.

    `variables`: more of its environment.

    Raises NotStarted; OSError (ENOMEM) where memory is short, which a worker reports in a way of its own.
    """
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
    # No GPU and no pool of threads: none of them is needed, and each takes memory.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # Else ggml starts a debugger where it aborts, which takes seconds.
    environment["GGML_NO_BACKTRACE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return environment


class HelperProcess:
    """One helper process. Several threads may use it; it is asked one question at a time."""

    def __init__(self, module: str, *args: str, start_s: float) -> None:
        """`module`: Python module to run when it is first needed. `start_s`: bound from its start to its first line."""
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
        """Start it now and return its first line. `opening`: lines to send it at once. Raises NotStarted."""
        with self._lock:
            self._end()
            self._opening = opening
            self._running()
            return self._greeting

    def restart(self) -> None:
        """Start it anew if it has ended; its opening lines stay the same. Raises NotStarted."""
        with self._lock:
            self._running()

    def tell_successors(self, *opening: bytes) -> None:
        """Set the opening lines of later processes, in place of those of this one."""
        with self._lock:
            self._opening = opening

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Send one line and return the answer, both without line ends. Blocks behind other callers and during a start.

        Raises NotStarted, TookTooLong, ProcessEnded.
        """
        with self._lock:
            process = self._running()
            return self._answer(process, question + b"\n", timeout_s)

    def close(self) -> None:
        """End the process; a later `ask` starts another."""
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
        before_s = processor_s(process.pid)
        try:
            return _exchanged(process, question, time.monotonic() + timeout_s)
        except TookTooLong:
            starved = is_starved(process.pid, before_s, timeout_s)
            self._end()
            raise TookTooLong(starved=starved) from None
        except EOFError:
            self._end(END_S)
            raise ProcessEnded(ending(process.returncode)) from None
        except BaseException:
            # Whatever it was: an answer that comes late would be taken for that to the next caller's question.
            self._end()
            raise

    def _end(self, grace_s: float = 0.0) -> None:
        """End the process. `grace_s`: time for it to end by itself, so that its own exit code is seen."""
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
    """Send the question and return the next line. Raises TookTooLong, and EOFError when the process closes a pipe."""
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
