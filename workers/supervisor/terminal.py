"""Writes lines to the terminal without waiting for it.

A terminal that is stopped (Ctrl-S), or a pipe whose reader has stopped reading, takes no more bytes, and a write to it
waits. A process that reads what its children write must not wait: the children would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from types import TracebackType

MAX_WAITING = 4 << 20
"""Most bytes that wait for the terminal; lines beyond that are left out, and counted."""
CLOSE_S = 2.0
"""Seconds that the terminal has at the end to take what waits."""
STDOUT, STDERR = 1, 2


class Terminal:
    """Standard output and standard error, written by a thread. Lines put in before `__exit__` are shown in order."""

    def __init__(self, stdout: int = STDOUT, stderr: int = STDERR) -> None:
        """`stdout`, `stderr`: file descriptors."""
        self._stdout, self._stderr = stdout, stderr
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_bytes = self._num_lost = 0
        self._is_over = False
        self._changed = threading.Condition()
        # A daemon, so that the program's end does not wait for it: it may be in a write that never ends.
        self._writer = threading.Thread(target=self._write, name="terminal", daemon=True)

    def __enter__(self) -> Terminal:
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._writer.join(CLOSE_S)

    def say(self, line: str) -> None:
        """Write a line to standard error, as soon as that takes it, without waiting."""
        self._put(self._stderr, line)

    def show(self, line: str) -> None:
        """Write a line to standard output, as soon as that takes it, without waiting."""
        self._put(self._stdout, line)

    def _put(self, descriptor: int, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "replace")
        with self._changed:
            if self._num_bytes + len(data) > MAX_WAITING:
                self._num_lost += 1
                return
            if self._num_lost:
                told = f"paddock: the terminal took no more; {self._num_lost} lines are left out here\n".encode()
                self._num_lost = 0
                self._keep(self._stderr, told)
            self._keep(descriptor, data)
            self._changed.notify_all()

    def _keep(self, descriptor: int, data: bytes) -> None:
        self._waiting.append((descriptor, data))
        self._num_bytes += len(data)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                descriptor, data = self._waiting[0]
            # A terminal that was closed must not keep the processes from being stopped in order.
            with contextlib.suppress(OSError):
                _write_whole(descriptor, data)
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(data)


def _write_whole(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process that has the terminal open may have made it non-blocking
            time.sleep(0.01)
