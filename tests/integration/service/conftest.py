"""A real Redis, and workers as processes of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.support.preloaded import start
from tests.support.redis_server import redis_binaries

ROOT = Path(__file__).resolve().parents[3]

Spawn = Callable[..., "Process"]


class Process:
    """A child whose first line of output may be awaited; killed at the end of its test."""

    def __init__(self, argv: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self._errors = folder / f"stderr-{time.monotonic_ns()}"
        said, theirs = os.pipe()
        self._said = os.fdopen(said, "rb")
        with self._errors.open("wb") as errors, os.fdopen(theirs, "wb"):
            # Tests here count steps, and ask for the same answer twice: a batch with drafts rounds numbers otherwise.
            plain = {"PADDOCK_SPECULATION": '{"ngram": false}'}
            self._child = start(argv, {**os.environ, **plain, **(environment or {})}, theirs, errors.fileno())
        self.pid = self._child.pid
        self.address = ""

    def wait_for_address(self) -> None:
        self.address = self._said.readline().decode().strip()
        assert self.address, self.errors()

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def wait(self, timeout_s: float = 10.0) -> int:
        return self._child.wait(timeout_s)

    def errors(self) -> str:
        return self._errors.read_text(encoding="utf-8")

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._said.close()


class RedisServer:
    """A redis-server on a Unix socket that a test may stop and start again."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self.client = Redis.from_url(self.url)
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [
            str(redis_binaries()[-1]),
            "--port",
            "0",
            "--unixsocket",
            str(self._socket),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._child = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(RedisError):
                self.client.ping()
                return
            assert time.monotonic() < deadline, "Redis did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        self._socket.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.start()
    yield server
    server.client.close()
    server.stop()


def start_fake(redis_url: str, folder: Path, *flags: str) -> Process:
    argv = [sys.executable, "-m", "tests.support.fake_worker", "--redis-url", redis_url, "--secret", "fake-secret"]
    process = Process([*argv, *flags], folder)
    try:
        process.wait_for_address()
    except BaseException:
        process.kill()
        raise
    return process


@pytest.fixture(scope="module")
def worker(redis_server: RedisServer, folder: Path) -> Iterator[Process]:
    """One worker for the tests that leave it as it was: 4 slots, answers of 20 tokens, 5 ms each."""
    flags = (
        "--slots",
        "4",
        "--tokens",
        "20",
        "--step-ms",
        "5",
        "--ctx",
        "100",
        "--model",
        "steady",
        "--grace-s",
        "0.3",
    )
    process = start_fake(redis_server.url, folder, *flags)
    yield process
    process.kill()


@pytest.fixture
def spawn(redis_server: RedisServer, folder: Path) -> Iterator[Spawn]:
    """Starts a fake worker with these flags."""
    started: list[Process] = []

    def start(*flags: str) -> Process:
        started.append(start_fake(redis_server.url, folder, *flags))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
