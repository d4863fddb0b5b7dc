"""A gateway that cannot start: one clear line and the exit code that goes with it."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.lifecycle import run
from gateway.settings import GatewaySettings
from tests.support.redis_server import RedisServer
from workers.protocol.exits import Exit


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`run` sets up the logging of a whole process."""
    root, server = logging.getLogger(), logging.getLogger("uvicorn.error")
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    server.setLevel(logging.NOTSET)
    server.filters.clear()


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with contextlib.closing(RedisServer()) as server:
        server.start()
        yield server.url


def last_words(capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    values = {"host": "127.0.0.1", "port": 0, "log_level": "error", "worker_secret": "hush", **settings}
    code = run(GatewaySettings.model_validate(values))
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return code, lines[0]


def test_a_taken_port(capsys: pytest.CaptureFixture[str], redis_url: str, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, line = last_words(capsys, redis_url=redis_url, state_dir=tmp_path, port=port)
    assert code == Exit.PORT_TAKEN
    assert f"port {port}" in line
    assert "--port" in line


def test_an_address_that_is_not_ours(capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    code, line = last_words(capsys, redis_url=redis_url, host="192.0.2.1")
    assert code == Exit.USAGE
    assert "192.0.2.1" in line


def test_no_redis_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = last_words(capsys, redis_url="")
    assert code == Exit.USAGE
    assert "PADDOCK_REDIS_URL" in line
    assert "paddock up" in line


def test_no_worker_secret(capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    code, line = last_words(capsys, redis_url=redis_url, worker_secret="")
    assert code == Exit.USAGE
    assert "PADDOCK_WORKER_SECRET" in line
    assert "paddock up" in line


def test_localhost_is_the_ipv4_address_that_paddock_up_looks_at(
    capsys: pytest.CaptureFixture[str], redis_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, line = last_words(capsys, redis_url=redis_url, host="localhost", port=port)
    assert code == Exit.PORT_TAKEN
    assert "localhost" in line


def test_redis_that_does_not_answer_is_waited_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    began = time.monotonic()
    code, line = last_words(capsys, redis_url=f"unix://{tmp_path}/none.sock", redis_wait_s=0.3)
    assert code == Exit.NO_REDIS
    assert "did not answer in 0.3 s" in line
    assert 0.3 <= time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_keys": "[{]"}, "api_keys"),
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint"),
        ({"catalog": "/nowhere/catalog.yaml"}, "/nowhere/catalog.yaml"),
        ({"state_dir": "/proc/none"}, "--state-dir"),
    ],
)
def test_settings_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], redis_url: str, tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    code, line = last_words(capsys, **{"redis_url": redis_url, "state_dir": tmp_path, **settings})
    assert code == Exit.USAGE
    assert words in line
