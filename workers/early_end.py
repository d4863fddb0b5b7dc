"""Ends the process at once on SIGTERM while a model is loaded, since nobody is served yet.

Python runs handlers between two of its instructions, and loading is one long call into C. In a container this process
may also be number 1, for which Linux ignores signals that have no handler.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from workers.protocol.exits import Exit

OVER = b"\0"
"""A byte that is no signal's number: it ends the watcher."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process on SIGTERM within this block. For the main thread."""
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
