"""Programs of ours as processes that start in a tenth of the time: forked from one that has loaded their modules.

What is forked is the program from its `main` on: with its own arguments, environment, output and session, as if an
interpreter had been started for it. Loading modules is most of what a gateway or worker does until it is ready, and a
test starts several.

    python -m tests.support.preloaded FD MODULE...      loads these, then forks what it is asked for on that socket
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
PRELOADED: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("gateway.cli", "gateway"): ("gateway.settings", "gateway.lifecycle"),
    ("gateway.cli", "worker"): ("gateway.settings", "workers.worker"),
    ("gateway.cli", "up"): ("gateway.settings", "gateway.commands.up"),
    ("gateway.cli", "supervisor"): ("gateway.settings", "workers.commands.supervisor"),
    ("gateway.cli", "models"): (
        *("gateway.settings", "workers.commands.models.command"),
        *("workers.commands.models.pull", "workers.commands.models.listing"),
    ),
    ("workers.cli", "worker"): ("workers.worker",),
    ("accounts.cli",): ("accounts.settings", "accounts.lifecycle"),
    ("tests.support.fake_worker",): ("tests.support.fake_worker",),
}
"""How a program is named on a command line -> what it loads."""
READ_AT_START = ("LD_", "PYTHON", "OMP_", "GGML_", "OPENBLAS_", "MALLOC_")
"""Variables that matter before `main`."""
MAX_MESSAGE_BYTES = 1 << 18
LOOK_S = 0.003


class Child(Protocol):
    """What tests ask of a process that they started: as `subprocess.Popen` has it."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start(command: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> Child:
    """Start the command in a session of its own, without input: forked where its program is known, else anew."""
    loads = _loads(command)
    if loads and not _changes_the_interpreter(env):
        return _forking(loads).fork(list(command[2:]), dict(env), stdout, stderr)
    return start_anew(command, env, stdout, stderr)


@dataclass(frozen=True, slots=True)
class Ended:
    """What a program did."""

    code: int
    out: str
    err: str


def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float = 60.0) -> Ended:
    """Start the command as `start` does, and wait for its end. Raises subprocess.TimeoutExpired."""
    with TemporaryFile() as out, TemporaryFile() as err:
        child = start(command, env, out.fileno(), err.fileno())
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise
        for file in (out, err):
            file.seek(0)
        return Ended(code, out.read().decode(), err.read().decode())


def start_anew(command: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> Child:
    """The same, by an interpreter of its own in any case."""
    return subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=ROOT, start_new_session=True
    )


def _loads(command: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that the command's program loads; none: it is not one of those."""
    if tuple(command[:2]) != (sys.executable, "-m"):
        return ()
    return next((loads for name, loads in PRELOADED.items() if tuple(command[2 : 2 + len(name)]) == name), ())


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in env if name.startswith(READ_AT_START) and name != "PYTHONUNBUFFERED"}


READ = _read_at_start(os.environ)
"""What the processes that fork have read: a test may change its own since."""


def _changes_the_interpreter(env: Mapping[str, str]) -> bool:
    """Say whether one of its variables would have to be there before the program's `main`."""
    return _read_at_start(env) != READ


class Forked:
    """A process that another one forked for this one; that one is its parent, and tells how it ended."""

    def __init__(self, forking: Forking, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forking = forking

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forking.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forking:
    """The process that has loaded some modules; it ends with this one."""

    def __init__(self, loads: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        with theirs:
            command = [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno()), *loads]
            # Threads of a library for matrices, which nobody here needs, would be lost by forking.
            env = os.environ | {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._popen = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def fork(self, argv: list[str], env: dict[str, str], stdout: int, stderr: int) -> Forked:
        return Forked(self, self.ask({"argv": argv, "env": env}, (stdout, stderr))["pid"])

    def ask(self, question: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(question).encode()], list(files))
            answer = self._socket.recv(MAX_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the process that forks has ended with {self._popen.wait()}")
        return json.loads(answer)


_forking = functools.cache(Forking)


def main() -> int:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        import_module(module)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        raise RuntimeError(f"{num_threads - 1} threads were started by loading modules; forking would lose them")
    gc.collect()
    gc.freeze()  # so that the collector touches none of the pages that are shared with those that are forked
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 2)
        if not message:
            return 0
        question = json.loads(message)
        if "poll" in question:
            channel.send(json.dumps({"code": _ended(question["poll"])}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            return _become(question["argv"], question["env"], files)
        for file in files:
            os.close(file)
        channel.send(json.dumps({"pid": pid}).encode())


def _ended(pid: int) -> int | None:
    """Return the exit code of a child, as `subprocess` tells it; None: it still runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(argv: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> int:
    """Be that program from now on."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run under nohup it is ignored
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    module = import_module(argv[0])
    sys.argv = [str(module.__file__), *argv[1:]]
    return int(module.main())


if __name__ == "__main__":
    sys.exit(main())
