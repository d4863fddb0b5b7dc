"""Helper processes that a worker forks at its birth, before it has any secret, and gives their work later.

They begin at once, since all is imported. Each is the worker's own child, in its process group. Those that are needed
beyond these, such as the successor of one that ended, are started as programs (`workers.process.helper_process`).
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from workers.forkserver.messages import CHUNK_BYTES, HelperOrder
from workers.process import parent_death
from workers.process.helper_process import Process, helper_environment, launched
from workers.process.limits import OOM_SCORE
from workers.process.standard_streams import STDERR, STDIN, STDOUT

NUM_AHEAD = 4
"""Number of helper processes: two that render templates, one that tokenises long texts, one for grammars."""
OWN = 3
"""Descriptor on which a helper process waits for its work; it has no other one beside its standard streams."""
MOST_DESCRIPTORS = 8
WAIT_LOOK_S = 0.001


class ForkedHelper:
    """A helper process that was forked, as `subprocess.Popen` would have it."""

    def __init__(self, pid: int, stdin: io.FileIO | None, stdout: io.FileIO | None) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal); None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another thread was faster
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(WAIT_LOOK_S)
        return code

    def kill(self) -> None:
        """Kill the process. Nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class HelpersAhead:
    """The helper processes that wait for work. Several threads may use it."""

    def __init__(self, waiting: list[tuple[int, socket.socket]]) -> None:
        self._waiting = waiting

    @classmethod
    def forked(cls, number: int = NUM_AHEAD) -> HelpersAhead:
        """Fork some; fewer if memory is short. Call it in a process with one thread and without secrets."""
        waiting: list[tuple[int, socket.socket]] = []
        with contextlib.suppress(OSError):
            for _ in range(number):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    pid = os.fork()
                    if not pid:
                        _serve(theirs)
                waiting.append((pid, ours))
        return cls(waiting)

    def launch(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        bufsize: int = 0,
    ) -> Process:
        """Return a process that runs `python -m MODULE ARGS`, as `launched` does. Raises NotStarted, OSError."""
        if self._waiting and list(command[:2]) == [sys.executable, "-m"]:
            with contextlib.suppress(OSError, IndexError):  # it has ended, or no descriptors are left
                return _employed(*self._waiting.pop(), command, dict(variables or {}), stdin, stdout, pass_fds)
        return launched(
            command, variables=variables, stdin=stdin, stdout=stdout, pass_fds=tuple(pass_fds), bufsize=bufsize
        )


def _employed(
    pid: int,
    control: socket.socket,
    command: Sequence[str],
    variables: dict[str, str],
    stdin: int | None,
    stdout: int | None,
    pass_fds: Sequence[int],
) -> ForkedHelper:
    """Give a waiting process its work. Raises OSError."""
    with contextlib.ExitStack() as opened:
        opened.enter_context(control)
        their_in, our_in = _ends(opened, stdin, is_input=True)
        their_out, our_out = _ends(opened, stdout, is_input=False)
        sent = {STDIN: their_in, STDOUT: their_out, **{number: number for number in pass_fds}}
        order = HelperOrder(
            module=command[2],
            args=tuple(command[3:]),
            variables=variables,
            descriptors=tuple(sent),
            cores=tuple(os.sched_getaffinity(0)),
            core_bytes=resource.getrlimit(resource.RLIMIT_CORE),
            oom_score=int(OOM_SCORE.read_text()),
        )
        socket.send_fds(control, [msgspec.msgpack.encode(order)], list(sent.values()))
        files = [
            None if end is None else io.FileIO(os.dup(end), mode) for end, mode in ((our_in, "wb"), (our_out, "rb"))
        ]
        return ForkedHelper(pid, *files)


def _ends(opened: contextlib.ExitStack, wish: int | None, *, is_input: bool) -> tuple[int, int | None]:
    """Return the helper's descriptor for one of its streams, and the worker's end of a pipe. `wish`: as
    `subprocess.Popen` takes it. `opened` closes both."""
    if wish is not None and wish >= 0:
        return wish, None
    if wish != subprocess.PIPE:
        null = os.open(os.devnull, os.O_RDWR)
        opened.callback(os.close, null)
        return null, None
    read, write = os.pipe()
    opened.callback(os.close, read)
    opened.callback(os.close, write)
    return (read, write) if is_input else (write, read)


def _serve(control: socket.socket) -> None:
    """Wait for the work, do it, and end. Never returns."""
    code = 1
    try:
        parent_death.end_with_parent()
        os.dup2(control.fileno(), OWN)
        os.closerange(OWN + 1, os.sysconf("SC_OPEN_MAX"))
        null = os.open(os.devnull, os.O_RDWR)
        for number in (STDIN, STDOUT, STDERR):
            os.dup2(null, number)
        os.close(null)
        os.environ.update(helper_environment())
        for name in os.environ.keys() - helper_environment().keys():
            del os.environ[name]
        code = _work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        os._exit(code)


def _work() -> int:
    """Receive the work and do it; return the exit code."""
    with socket.socket(fileno=OWN) as control:
        told, ends, _, _ = socket.recv_fds(control, CHUNK_BYTES, MOST_DESCRIPTORS)
    if not told:  # the worker has ended
        return 0
    order = msgspec.msgpack.decode(told, type=HelperOrder)
    # Received descriptors may have the numbers that others are to get.
    free = max(*order.descriptors, *ends) + 1
    for place, end in enumerate(ends):
        os.dup2(end, free + place)
    for end in ends:
        os.close(end)
    for place, number in enumerate(order.descriptors):
        os.dup2(free + place, number)
        os.close(free + place)
    os.sched_setaffinity(0, order.cores)
    resource.setrlimit(resource.RLIMIT_CORE, order.core_bytes)
    with contextlib.suppress(OSError):  # a container that forbids it
        OOM_SCORE.write_text(str(order.oom_score))
    os.environ.update(order.variables)
    sys.argv[:] = [order.module, *order.args]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    return 0
