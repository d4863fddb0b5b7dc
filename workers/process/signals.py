"""Ends a process: when a signal asks it to stop, or when the process that started it ends.

    python -m workers.process.signals PROGRAM ARGS...

becomes PROGRAM, which then ends when its parent does (on Linux).

The supervisor sets `PADDOCK_DIE_WITH_PARENT` to its own process id. Linux tells the child by a signal when its parent
is gone (prctl(2), PR_SET_PDEATHSIG, kept across execve); elsewhere a thread looks every second, which a PROGRAM that
replaces this one does not have.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
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
    watcher = threading.Thread(target=_await_signal, args=(read,), name="early end", daemon=True)
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


def _await_signal(read: socket.socket) -> None:
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


VARIABLE = "PADDOCK_DIE_WITH_PARENT"
PR_SET_PDEATHSIG = 1


def hold() -> None:
    """End this process when its parent ends, if `PADDOCK_DIE_WITH_PARENT` asks for it. Call first thing in `main`.

    The signal is SIGKILL: with the parent gone nobody is left to bound a slow shutdown.
    """
    expected = os.environ.get(VARIABLE, "")
    if not expected:
        return
    parent = os.getppid()
    if not end_with_parent():
        threading.Thread(target=_await_parent, args=(parent,), name="parent death", daemon=True).start()
    # The parent may have ended before the line above.
    if os.getppid() != parent or (expected.isdigit() and int(expected) > 1 and int(expected) != parent):
        os._exit(1)


def end_with_parent() -> bool:
    """Have Linux end this process when the thread that started it ends; return False on other systems."""
    if sys.platform != "linux":
        return False
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return True


def _await_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    hold()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - becoming the program is the point
