"""The process that forks workers: `python -m workers.forkserver`, started by a supervisor.

It imports what a worker imports and then forks a process for each order. It has one thread, starts no backend of
llama.cpp, opens no connection, and never has a worker's settings. Forks are made twice, so that the new process is not
this one's child but, by Linux' rule for orphans (prctl(2), PR_SET_CHILD_SUBREAPER), the supervisor's: workers outlive
this process, and the supervisor waits for them as for any child.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from workers import sources, worker
from workers.cli import COMMANDS
from workers.commands import command
from workers.forkserver import newborn
from workers.forkserver.messages import DESCRIPTOR, ORDER
from workers.process import parent_death
from workers.process.helper_process import Launch
from workers.settings import WorkerSettings


def main() -> int:
    parent_death.hold()
    supervisor = os.getppid()
    control = socket.socket(fileno=int(os.environ.pop(DESCRIPTOR)))
    worker.prepare()
    if (num_threads := _num_threads()) != 1:
        print(f"paddock: a library runs {num_threads - 1} threads, so that no process can be forked", file=sys.stderr)
        return 1
    gc.collect()
    gc.freeze()  # so that the collector touches none of the pages that are shared with workers
    while True:
        order, ends, _, _ = socket.recv_fds(control, len(ORDER), 1)
        if not order:
            return 0
        is_new = len(ends) == 1 and _forked()
        if is_new:
            control.close()
            born = newborn.begin(supervisor, ends[0], _rehearse)
            _end(0 if born is None else command.guarded(partial(_run, born.launch)))
        for end in ends:
            os.close(end)


def _rehearse() -> None:
    """Read settings as a worker does, before there are any: so memory that is shared until somebody writes to it is
    copied while nobody waits."""
    with suppress(sources.SettingsError):
        sources.read(WorkerSettings)


def _run(launch: Launch) -> int:
    """Run the worker, as `python -m workers.cli worker` does; return its exit code."""
    parent_death.hold()
    return command.run("worker", COMMANDS["worker"], (), launch=launch)


def _end(code: int) -> NoReturn:
    """End the worker with this exit code. Python's own way, module by module, takes 40 ms, in which the worker's memory
    is not free yet for the next one."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _forked() -> bool:
    """Fork a process that is the supervisor's child; return whether this is it. If that fails, its socket just closes,
    which tells the supervisor."""
    try:
        between = os.fork()
    except OSError as error:
        print(f"paddock: no process can be forked: {error.strerror}", file=sys.stderr)
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        last = os.fork()
    except OSError:
        os._exit(1)
    if last:
        os._exit(0)
    return True


def _num_threads() -> int:
    """Return the number of this process's threads, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    sys.exit(main())
