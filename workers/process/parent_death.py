"""Ends a process when the process that started it ends.

    python -m workers.process.parent_death PROGRAM ARGS...

becomes PROGRAM, which then ends when its parent does (on Linux).

The supervisor sets `PADDOCK_DIE_WITH_PARENT` to its own process id. Linux sends the child a signal when its parent is
gone (prctl(2), PR_SET_PDEATHSIG, kept across execve). On other systems a thread checks every second; a PROGRAM that
replaces this process no longer has that thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

VARIABLE = "PADDOCK_DIE_WITH_PARENT"
PR_SET_PDEATHSIG = 1


def hold() -> None:
    """Have this process end when its parent ends, if `PADDOCK_DIE_WITH_PARENT` is set. Call it first in `main`.

    The signal is SIGKILL: with the parent gone, nothing would bound a slow shutdown."""
    expected = os.environ.get(VARIABLE, "")
    if not expected:
        return
    parent = os.getppid()
    if not end_with_parent():
        threading.Thread(target=_watch, args=(parent,), name="parent death", daemon=True).start()
    # The parent may have ended before the lines above.
    if os.getppid() != parent or (expected.isdigit() and int(expected) > 1 and int(expected) != parent):
        os._exit(1)


def end_with_parent() -> bool:
    """Have Linux end this process when the thread that started it ends; return False on other systems."""
    if sys.platform != "linux":
        return False
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    hold()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - becoming the program is the point
