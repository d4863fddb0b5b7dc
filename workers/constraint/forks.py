"""Runs callers' grammars in processes of their own: llama.cpp may abort over a grammar or never return, and can't be
stopped within a process.

One process has the model's vocabulary in memory. It forks another process for each trial of a grammar, and for each
answer that a grammar constrains (`workers.llama.sampling.grammar_forks`). A forked process ends by itself when a
question takes too long, and when the other ends of its sockets are closed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Literal, NoReturn

from workers.models.overrides import MetadataValue
from workers.process.helper_process import Launch, NotStarted, Process, ProcessEnded, TookTooLong, ending, launched
from workers.process.limits import started_threads

START_S = 60.0

Kind = Literal["gbnf", "lark"]

COMPILE, TRY, BEGIN, PERMITS, ALLOWED, ACCEPT = b"CTBPLA"
"""Questions to a forked process: compile a grammar; try a grammar; begin an answer anew, with these first tokens; may
this token come next; which tokens may come next; take this token as the next one."""

OK, REFUSED = 0, 1
"""First byte of an answer. OK: the answer follows; REFUSED: the reason for the refusal follows."""

HEADER = struct.Struct("<BI")
"""Header of a message: the question or the kind of answer, and how many bytes follow."""

MAX_ANSWER = 4 << 20
SENT_AT_ONCE = 256 << 10

ENDING = struct.Struct("<i")
"""Message by which the forking process tells the worker how a forked process ended: its exit code or, if negative, the
signal that ended it. The message comes over the socket `life` of `Fork`."""

NOT_BEGUN = 75
"""Exit code of a forked process that failed before its first question; also reported if forking itself failed."""

ANSWER_S = 10.0
"""Seconds to wait for an answer; after that, the forked process is taken to hang, or to get no processor time."""


class Fork:
    """The worker's connection to one forked process. For one thread at a time; garbage collection ends the process."""

    def __init__(self, end: socket.socket, life: socket.socket, end_stuck: Callable[[], bool] = lambda: False) -> None:
        """`end`: the socket for questions and answers. `life`: closing this socket ends the process, whatever the
        process is doing; it also receives how the process ended (`ENDING`). `end_stuck`: see the method."""
        self._end, self._life = end, life
        self._end_stuck = end_stuck
        self._is_over = False
        """Whether the forked process has ended, so that the socket `life` is polled instead of `end`."""
        for one in (end, life):
            weakref.finalize(self, one.close).atexit = False
        self._received = b""
        self._unsent: deque[memoryview] = deque()
        self._asked_at = 0.0
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def ask(self, what: int, body: bytes = b"") -> None:
        """Send a question without waiting; answers come in the order of the questions."""
        self._unsent.append(memoryview(HEADER.pack(what, len(body)) + body))
        self._asked_at = time.monotonic()
        self._send()

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Return whether `take` would return or raise at once; blocks for `wait_s` at most."""
        self._send()
        if time.monotonic() - self._asked_at > ANSWER_S:
            return True
        return bool(self._poll.poll(wait_s * 1e3))

    def take(self, wait_s: float) -> tuple[int, bytes] | None:
        """Return the next answer: OK or REFUSED, and its bytes; None if it has not come within `wait_s`.

        Raises TookTooLong (`starved`: see `end_stuck`), ProcessEnded (with the text of `helper_process.ending`),
        NotStarted if the process could not be forked."""
        until = time.monotonic() + wait_s
        while (answer := self._whole()) is None:
            left = until - time.monotonic()
            self._send()
            if not self._poll.poll(max(0.0, left) * 1e3):
                if time.monotonic() - self._asked_at > max(ANSWER_S, wait_s):
                    raise TookTooLong(starved=self.end_stuck())
                if left <= 0:
                    return None
                continue
            self._read()
        return answer

    def end_stuck(self) -> bool:
        """Kill the forking process if it has not forked this process yet; return whether it had not. Never blocks.

        Call it after seconds without an answer: the forking process is stopped then, or gets no processor time."""
        return self._end_stuck()

    def close(self) -> None:
        """End the process at once."""
        self._end.close()
        self._life.close()

    def _whole(self) -> tuple[int, bytes] | None:
        if len(self._received) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._received)
        if length > MAX_ANSWER:
            raise ProcessEnded("it sent too much")
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        body, self._received = self._received[HEADER.size : end], self._received[end:]
        return kind, body

    def _read(self) -> None:
        """Read what the process has sent. Raises ProcessEnded, NotStarted."""
        if self._is_over:
            self._read_ending()
        try:
            data = self._end.recv(SENT_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received += data
            return
        # In a moment, the forking process will say how this process ended.
        self._is_over = True
        self._poll.unregister(self._end)
        self._poll.register(self._life, select.POLLIN)

    def _read_ending(self) -> NoReturn:
        """Raise the error for how the process ended: ProcessEnded or NotStarted."""
        try:
            told = self._life.recv(ENDING.size, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except OSError:
            told = b""
        if len(told) < ENDING.size:  # the forking process is gone as well
            raise ProcessEnded(signal.SIGKILL.name)
        (code,) = ENDING.unpack(told)
        if code == NOT_BEGUN:
            raise NotStarted("it could not be forked, or not begin")
        raise ProcessEnded(ending(code))

    def _send(self) -> None:
        """Send as many unsent bytes as the socket has room for. If the process is gone, `take` notices."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionError):
            while self._unsent:
                first = self._unsent[0]
                sent = self._end.send(first[:SENT_AT_ONCE])
                if sent < len(first):
                    self._unsent[0] = first[sent:]
                else:
                    self._unsent.popleft()


class _ForkingProcess:
    """One process that forks others, and confirms each fork. Safe to use from several threads."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        """`control`: the socket for the requests to fork and their confirmations, one byte each; non-blocking."""
        self.process = process
        self._control = control
        self._lock = threading.Lock()
        self._num_asked = self._num_confirmed = 0
        self._is_stuck = False

    @property
    def is_running(self) -> bool:
        return not self._is_stuck and self.process.poll() is None

    def ask(self, ends: list[int]) -> int:
        """Ask for a fork that gets these descriptors; return the fork's number. Never blocks. Raises OSError."""
        with self._lock:
            self._count()
            socket.send_fds(self._control, [b"f"], ends)
            self._num_asked += 1
            return self._num_asked

    def end_stuck(self, number: int) -> bool:
        """Kill the process if it has not confirmed the fork with this number; return whether it had not."""
        with self._lock:
            self._count()
            if self._num_confirmed >= number:
                return False
            self._is_stuck = True
        self.process.kill()
        return True

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self._control.close()
        self.process.kill()
        self.process.wait()

    def _count(self) -> None:
        with contextlib.suppress(OSError):  # there are no more, or `end` was called
            while confirmed := self._control.recv(4096):
                self._num_confirmed += len(confirmed)


class Forks:
    """The process that forks a process for each trial or answer. Safe to use from several threads."""

    def __init__(
        self,
        model: Path,
        overrides: Mapping[str, MetadataValue] | None = None,
        *,
        start_s: float = START_S,
        launch: Launch = launched,
    ) -> None:
        """`model`: the GGUF file whose vocabulary the grammars are for, with `overrides` in place of its metadata.
        `start_s`: seconds to wait for the start.

        Raises RuntimeError if there is no memory for a thread."""
        self._command = [sys.executable, "-m", "workers.llama.sampling.grammar_forks", str(model)]
        self._command.append(json.dumps(dict(overrides or {})))
        self._start_s = start_s
        self._launch = launch
        self._lock = threading.Lock()
        self._forking: _ForkingProcess | None = None
        self._threads = started_threads("paddock-forks", 1)
        """One thread, which restarts the forking process if it has ended or is stuck, so that the engine's thread need
        not wait."""
        self._starting: Future[None] | None = None

    @property
    def pid(self) -> int | None:
        forking = self._forking
        return None if forking is None else forking.process.pid

    def start(self) -> None:
        """Start the process, if none runs or it is stuck; blocks until it is ready. Raises NotStarted."""
        with self._lock:
            if self._forking is not None and self._forking.is_running:
                return
            self._end()
            control, theirs = _pair()
            try:
                with theirs:
                    process = self._launch(self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
            except BaseException:
                control.close()
                raise
            control.settimeout(self._start_s)
            try:
                is_ready = control.recv(1)
            except OSError:
                is_ready = b""
            if not is_ready:
                _ForkingProcess(process, control).end()
                raise NotStarted(f"not ready within {self._start_s:g} s, or ended")
            control.setblocking(False)
            self._forking = _ForkingProcess(process, control)

    def fork(self) -> Fork | None:
        """Return a newly forked process that has no grammar yet; does not block.

        If the forking process does not run or is stuck, start it on another thread, and return None meanwhile.
        Raises NotStarted."""
        forking = self._forking
        if forking is None or not forking.is_running:
            self._begin_start()
            return None
        self._starting = None
        end, their_end = _pair()
        try:
            life, their_life = _pair()
        except NotStarted:
            end.close()
            their_end.close()
            raise
        end.setblocking(False)
        with their_end, their_life:
            try:
                number = forking.ask([their_end.fileno(), their_life.fileno()])
            except OSError as error:
                end.close()
                life.close()
                raise NotStarted(error.strerror) from None
        return Fork(end, life, functools.partial(forking.end_stuck, number))

    def is_ready(self, wait_s: float) -> bool:
        """Return whether `fork`, if it returned None, should be called again; blocks for `wait_s` at most."""
        starting = self._starting
        if starting is not None:
            wait((starting,), wait_s)
        return starting is None or starting.done()

    def _begin_start(self) -> None:
        starting = self._starting
        if starting is None:
            try:
                self._starting = self._threads.submit(self._start_aside)
            except RuntimeError as error:
                raise NotStarted(str(error)) from None  # `close` was called
        elif starting.done():
            self._starting = None
            raise NotStarted("the process that forks did not start")

    def _start_aside(self) -> None:
        with contextlib.suppress(NotStarted, OSError):  # the next call of `fork` finds out
            self.start()

    def close(self) -> None:
        """End the process for good. The processes that it forked end when their sockets are closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._end()

    def _end(self) -> None:
        forking, self._forking = self._forking, None
        if forking is not None:
            forking.end()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets. Raises NotStarted."""
    try:
        return socket.socketpair()
    except OSError as error:  # there are no descriptors left
        raise NotStarted(error.strerror) from None


def receive(end: int) -> tuple[int, bytes] | None:
    """Receive the next question, in the forked process; None if no more will come."""
    header = _exactly(end, HEADER.size)
    if header is None:
        return None
    what, length = HEADER.unpack(header)
    body = _exactly(end, length)
    return None if body is None else (what, body)


def answer(end: int, kind: int, body: bytes) -> None:
    """Send one answer, from the forked process."""
    data = memoryview(HEADER.pack(kind, len(body)) + body)
    while data:
        data = data[os.write(end, data) :]


def _exactly(end: int, length: int) -> bytes | None:
    parts = []
    while length:
        part = os.read(end, min(length, SENT_AT_ONCE))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
