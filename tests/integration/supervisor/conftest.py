"""`paddock up` and `paddock supervisor` as real processes, looked at from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from tests.support.preloaded import Child, start
from tests.support.redis_server import RedisServer
from tests.support.stack import DEMO_MODEL, ROOT

PATIENCE_S = 60.0


def wait_until(happened: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_S:g} s: {what()}")
        time.sleep(0.02)


@contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Have every look at what is in a folder fail, for root too, as on a disk that fails: its name leads nowhere, with
    an error that is none of those for "no such file"."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.symlink_to("x" * 300)
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


@dataclass(slots=True)
class Program:
    """One run of the `paddock` program, in a session of its own."""

    popen: Child
    terminal: Path
    """Everything it printed."""
    state: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def text(self) -> str:
        return self.terminal.read_text(errors="replace")

    def until(self, said: str, times: int = 1) -> None:
        def happened() -> bool:
            if self.popen.poll() is not None:
                pytest.fail(f"ended with {self.popen.returncode} before saying {said!r}:\n{self.text()}")
            return self.text().count(said) >= times

        wait_until(happened, lambda: f"{said!r} in\n{self.text()}")

    def family(self) -> dict[int, psutil.Process]:
        """Itself and all its descendants, those seen earlier included."""
        if self.popen.poll() is None:
            root = psutil.Process(self.popen.pid)
            self.seen |= {process.pid: process for process in [root, *root.children(recursive=True)]}
        return self.seen

    def survivors(self) -> list[str]:
        """Command lines of what still runs of the family."""
        alive = [process for process in self.seen.values() if process.is_running()]
        return [" ".join(process.cmdline()) for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def send(self, number: signal.Signals) -> None:
        self.family()
        self.popen.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return self.wait()

    def wait(self) -> int:
        try:
            return self.popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on after {PATIENCE_S:g} s; {self.survivors()} run, and it says\n{self.text()}")

    def worker_pid(self, name: str) -> int:
        """Process id of the worker in a place; 0 while there is none."""
        for process in psutil.Process(self.popen.pid).children(recursive=True):
            try:
                if process.name() == name:  # as forked workers are called
                    return process.pid
            except psutil.Error:
                continue
        return 0


class Programs:
    """Starts programs on one state folder and makes sure that none outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.started: list[Program] = []

    def start(self, command: str, *flags: str, **environment: str) -> Program:
        return self._start((), command, flags, environment)

    def start_anew(self, command: str, *flags: str, **environment: str) -> Program:
        """Start it by an interpreter of its own, as a person does: the others are forked."""
        return self._start((), command, flags, environment, is_forked=False)

    def start_without(self, closed: Sequence[int], command: str, *flags: str) -> Program:
        """Start it with these of the descriptors 0, 1 and 2 closed."""
        return self._start(closed, command, flags, {}, is_forked=False)

    def _start(
        self,
        closed: Sequence[int],
        command: str,
        flags: Sequence[str],
        environment: Mapping[str, str],
        is_forked: bool = True,
    ) -> Program:
        terminal = self.folder / f"terminal-{len(self.started)}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PADDOCK_", "HF_"))}
        clean |= {"PADDOCK_STATE_DIR": str(self.state), **environment}
        if "--catalog" not in flags:
            clean["PADDOCK_LLAMA"] = '{"n_threads": 1}'
        argv = [sys.executable, "-m", "gateway.cli", command, *flags]
        with terminal.open("wb") as output:
            if is_forked:
                popen = start(argv, clean, output.fileno(), output.fileno())
            else:
                popen = subprocess.Popen(
                    argv,
                    env=clean,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=partial(_set_up, tuple(closed)),  # noqa: PLW1509 - one thread
                )
        program = Program(popen, terminal, self.state)
        self.started.append(program)
        return program

    def close(self) -> None:
        for program in self.started:
            program.family()
            program.popen.kill()
            program.popen.wait()
            for process in program.seen.values():
                if process.is_running():
                    process.kill()


def _set_up(closed: Sequence[int]) -> None:
    # As from a terminal: under nohup the tests themselves ignore a hang-up, and programs inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for descriptor in closed:
        os.close(descriptor)


@pytest.fixture
def programs(short_folder: Path) -> Iterator[Programs]:
    held = Programs(short_folder)
    yield held
    held.close()


@pytest.fixture(scope="session")
def model() -> Path:
    return DEMO_MODEL


class Catalog:
    def __init__(self, file: Path, model: Path) -> None:
        self.file = file
        self._model = model

    def entry(self, name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "path": str(self._model), "slots": 1, "ctx": 64, "llama": {"n_threads": 1}, **more}

    def write(self, *models: dict[str, Any], **more: Any) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"models": models, **more}))
        fresh.rename(self.file)


@pytest.fixture
def catalog(programs: Programs, model: Path) -> Catalog:
    return Catalog(programs.folder / "catalog.json", model)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(server.socket)) as made:
        yield made
