"""Signals that ask a process to stop: how they act while a model loads, and in programs that keep other processes."""

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
"""A byte that is no signal's number: it ends the watcher."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process at once on SIGTERM within this block: nobody is served yet. For the main thread.

    Python runs handlers between two of its instructions, and loading a model is one long call into C. In a container
    this process may also be number 1, for which Linux ignores signals that have no handler.
    """
    read, write = socket.socketpair()
    write.setblocking(False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    fd = signal.set_wakeup_fd(write.fileno())  # written to by the handler in C, whatever Python does
    watcher = threading.Thread(target=_watch, args=(read,), name="early end", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)  # first: no signal falls between the two
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
    """Turns SIGINT, SIGTERM and a closed terminal into calls: the first asks to stop, the second not to wait. Handles
    them within `with`, on a running loop of the main thread, which calls each function once."""

    def __init__(self, on_stop: Callable[[], None], on_hurry: Callable[[], None]) -> None:
        self._actions = [on_hurry, on_stop]
        # Under nohup a closed terminal is to be ignored.
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
