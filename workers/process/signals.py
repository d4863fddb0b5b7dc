"""Handles the signals that ask a process to stop: while a model loads, and in programs that run other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType

from workers.protocol.exits import Exit

OVER = b"\0"
"""The byte that ends the watcher thread; no signal has this number."""

ALWAYS = (signal.SIGINT, signal.SIGTERM)

RESERVED_BY = {signal.SIGUSR1: True, signal.SIGUSR2: False}
"""Signal by which a supervisor reserves or releases a worker that has registered -> whether it is reserved then."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop: SIGINT, SIGTERM and, unless it is ignored, SIGHUP.

    SIGHUP says that the terminal is gone. Under nohup it is ignored, and must stay so."""
    return ALWAYS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ALWAYS, signal.SIGHUP)


def is_hurrying(number: int) -> bool:
    """Return whether this signal, coming to a process that stops already, means that it is to stop at once.

    SIGHUP does not: when a terminal is closed, first the shell sends it, then the kernel as the shell ends; systemd
    sends it right after SIGTERM (SendSIGHUP=)."""
    return number != signal.SIGHUP


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process at once if SIGTERM or SIGHUP comes within this block, in which nobody is served yet. For the main
    thread.

    An ordinary handler would run too late: Python runs it between two bytecode instructions, and loading a model is one
    long call into C. Without any handler the signal may do nothing: in a container this process can be number 1, which
    gets no signals from Linux that it has no handler for."""
    read, write = socket.socketpair()
    write.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in stop_signals() if number != signal.SIGINT}
    fd = signal.set_wakeup_fd(write.fileno())  # written to by Python's handler in C, even during a call into C
    watcher = threading.Thread(target=_watch, args=(read, frozenset(before)), name="early end", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # first, so that no signal is lost between the two calls
        signal.set_wakeup_fd(fd)
        write.send(OVER)
        watcher.join()
        read.close()
        write.close()


def _watch(read: socket.socket, ending: Collection[int]) -> None:
    while (number := read.recv(1)) != OVER:
        if number[0] in ending:
            os._exit(Exit.OK)


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP (a closed terminal) within a `with` block: the first signal calls `on_stop`,
    the second, if it is not SIGHUP, `on_hurry`, further ones nothing. Needs a running event loop on the main thread."""

    def __init__(self, on_stop: Callable[[], None], on_hurry: Callable[[], None]) -> None:
        self._on_stop, self._on_hurry = on_stop, on_hurry
        self._stops = self._hurries = False
        self._numbers = stop_signals()

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    def _received(self, number: int) -> None:
        if not self._stops:
            self._stops = True
            self._on_stop()
        elif not self._hurries and is_hurrying(number):
            self._hurries = True
            self._on_hurry()
