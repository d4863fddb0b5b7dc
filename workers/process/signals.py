"""Handles the signals that ask a process to stop: while a model loads, and in programs that run other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from workers.protocol.exits import Exit

OVER = b"\0"
"""The byte that ends the watcher thread; no signal has this number."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process at once if SIGTERM comes within this block, in which nobody is served yet. For the main thread.

    An ordinary handler would run too late: Python runs it between two bytecode instructions, and loading a model is one
    long call into C. Without any handler the signal may do nothing: in a container this process can be number 1, which
    gets no signals from Linux that it has no handler for."""
    read, write = socket.socketpair()
    write.setblocking(False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    fd = signal.set_wakeup_fd(write.fileno())  # written to by Python's handler in C, even during a call into C
    watcher = threading.Thread(target=_watch, args=(read,), name="early end", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)  # first, so that no signal is lost between the two calls
        signal.set_wakeup_fd(fd)
        write.send(OVER)
        watcher.join()
        read.close()
        write.close()


def _watch(read: socket.socket) -> None:
    while (number := read.recv(1)) != OVER:
        if number == bytes([signal.SIGTERM]):
            os._exit(Exit.OK)


ALWAYS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP (a closed terminal) within a `with` block: the first signal calls `on_stop`,
    the second `on_hurry`, further ones nothing. Needs a running event loop on the main thread."""

    def __init__(self, on_stop: Callable[[], None], on_hurry: Callable[[], None]) -> None:
        self._actions = [on_hurry, on_stop]
        # Under nohup SIGHUP is ignored, and must stay so.
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        self._numbers = (*ALWAYS, *hangup)

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    def _received(self) -> None:
        if self._actions:
            self._actions.pop()()
