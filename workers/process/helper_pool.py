"""Keeps several helper processes of one kind: while one works for a team, the others serve other teams."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

from workers.process.helper_process import HelperProcess, Launch, NotStarted, ProcessEnded, TookTooLong, launched

SPARE_AFTER_S = 3.0
"""Seconds between the starts of the first and the second process. By then the worker has begun to serve."""


class HelperPool:
    """Lends helper processes, one question at a time. Safe to use from several threads.

    A process that ended, or took too long, is started again at once, so that the next question need not wait for it."""

    def __init__(self, module: str, *, number: int, start_s: float, launch: Launch = launched) -> None:
        """`module`, `start_s`: as `HelperProcess` has them. `number`: how many processes; each starts when it is first
        needed, unless `start` or `start_spare` is called."""
        self._processes = [HelperProcess(module, start_s=start_s, launch=launch) for _ in range(number)]
        self._free: queue.LifoQueue[HelperProcess] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)
        self._closed = False
        self._closing = threading.Lock()
        self._spare = threading.Timer(SPARE_AFTER_S, self._start_second)
        self._spare.daemon = True

    @property
    def pid(self) -> int | None:
        """Id of the process that is used first."""
        return self._processes[0].pid

    def start(self, opening: bytes) -> bytes:
        """Start the first process, send it a line and return its first one. Raises NotStarted."""
        return self._processes[0].start(opening)

    def start_spare(self) -> None:
        """Start the second process, if there is one, `SPARE_AFTER_S` seconds from now. Call it once."""
        self._spare.start()

    def tell_successors(self, opening: bytes) -> None:
        """Set the line that each process gets when it is started from now on."""
        for process in self._processes:
            process.tell_successors(opening)

    @contextlib.contextmanager
    def lent(self) -> Iterator[HelperProcess]:
        """Lend a process to the block. Blocks until one is free."""
        process = self._free.get()
        try:
            yield process
        except (TookTooLong, ProcessEnded):
            _restart(process)
            raise
        finally:
            self._free.put(process)

    def close(self) -> None:
        self._spare.cancel()
        with self._closing:
            self._closed = True
            for process in self._processes:
                process.close()

    def _start_second(self) -> None:
        with self._closing:
            if not self._closed and len(self._processes) > 1:
                _restart(self._processes[1])


def _restart(process: HelperProcess) -> None:
    with contextlib.suppress(NotStarted):  # whoever asks next gets the error
        process.restart()
