"""Turns a process that was just forked into a worker's: its session, streams, name, helper processes, environment."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from workers.forkserver.helpers import HelpersAhead
from workers.forkserver.messages import OUTPUT, PID_BYTES, Birth, read_to_end
from workers.process.standard_streams import STDERR, STDIN, STDOUT

ADOPTED_S = 10.0
"""Maximum seconds until the supervisor is this process's parent. It takes less than a millisecond."""
ADOPTED_LOOK_S = 0.0002
IN_A_HURRY_S = 0.05
"""Seconds within which a process that is needed at once gets its identity."""

PR_SET_NAME = 15
AS_SERVER, AS_WORKER = b"workers.forkserver\0", b"workers.cli\0worker\0"
"""End of the command line of the process that forks, and of a worker that was started as a program. They have the same
length, so that the second fits the place of the first."""
ARG_START, ARG_END = 48, 49
"""Positions in `/proc/self/stat` of the addresses between which the kernel finds the command line. Source: proc(5)."""


def begin(supervisor: int, private: int, rehearse: Callable[[], None]) -> HelpersAhead | None:
    """Make this process a worker's, with the environment that the supervisor (a process id) sends; return the helper
    processes that it has. None: nobody wants it any more.

    `private`: descriptor of the socket to the supervisor. `rehearse` is called if nobody waits for the worker yet."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (STDIN, STDOUT, STDERR):
        os.dup2(null, number)
    os.close(null)
    with socket.socket(fileno=private) as life:
        if not _is_adopted(supervisor):
            return None
        helpers = HelpersAhead.forked()  # before this process has secrets
        try:
            life.sendall(str(os.getpid()).encode().ljust(PID_BYTES))
            if not select.select([life], [], [], IN_A_HURRY_S)[0]:
                rehearse()
            _, outputs, _, _ = socket.recv_fds(life, len(OUTPUT), 1)
            told = read_to_end(life)
        except OSError:
            outputs, told = [], b""
    if not told or not outputs:
        return None
    for number in (STDOUT, STDERR):
        os.dup2(outputs[0], number)
    os.close(outputs[0])
    birth = msgspec.msgpack.decode(told, type=Birth)
    os.environ.clear()
    os.environ.update(birth.environment)
    _rename(birth.name)
    return helpers


def _is_adopted(supervisor: int) -> bool:
    """Wait until this process's parent is the supervisor; return False if it does not become that."""
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            return False
        time.sleep(ADOPTED_LOOK_S)
    return True


def _rename(name: str) -> None:
    """Have the system show this process as a worker with this name. Best effort."""
    sys.argv[:] = ["workers.cli", "worker"]
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    with suppress(OSError, ValueError, IndexError):
        # The program's name, in brackets, may have spaces and brackets itself.
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = (int(fields[at - 3]) for at in (ARG_START, ARG_END))
        place = end - len(AS_SERVER)
        if start < place and ctypes.string_at(place, len(AS_SERVER)) == AS_SERVER:
            ctypes.memmove(place, AS_WORKER, len(AS_WORKER))
