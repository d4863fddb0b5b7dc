"""`paddock drain`: whom it asks, with which secret, and what it says of flags that are wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from gateway.settings import known_settings as known
from workers.commands import drain
from workers.protocol.control import drain_token, gateway_drain_token
from workers.protocol.exits import Exit
from workers.settings import PaddockSettings

PARTS: dict[str, type[PaddockSettings]] = {"gateway": GatewaySettings, **drain.PARTS}


class Asked(HTTPServer):
    """Says that all is drained, and remembers who was asked what."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str]] = []
        self.body = b'{"status": "drained", "calls": 0, "waited_s": 1.5, "worker": "w", "boot": "b"}'


class Handler(BaseHTTPRequestHandler):
    server: Asked

    def do_GET(self) -> None:
        assert self.path == "/health"
        self._answer()

    def do_POST(self) -> None:
        self.server.requests.append((self.path, self.headers["Authorization"]))
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def asked() -> Iterator[Asked]:
    with Asked() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(*args: str) -> int:
    return drain.main(args, known(), PARTS)


def test_it_asks_the_process_that_the_settings_name(
    asked: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = str(asked.server_port)
    assert run("gateway", "--host", "0.0.0.0", "--port", port, "--gateway-secret", "hush", "--settle-s", "2") == 0
    assert run("worker", "--worker-port", port, "--worker-secret", "hush", "--timeout-s", "30") == 0
    (tmp_path / "worker-secret").write_text("of the folder\n")
    assert run("worker", "--worker-port", port, "--state-dir", str(tmp_path)) == 0
    assert run("gateway", "--port", port, "--state-dir", str(tmp_path), "--api-key", "pk-admin") == 0
    assert asked.requests == [
        ("/health/drain?settle_s=2.0", f"Bearer {gateway_drain_token('hush')}"),
        ("/health/drain?timeout_s=30.0", f"Bearer {drain_token('hush', 'w', 'b')}"),
        ("/health/drain?", f"Bearer {drain_token('of the folder', 'w', 'b')}"),
        ("/health/drain?", "Bearer pk-admin"),
    ]
    assert capsys.readouterr().out.splitlines() == ["paddock: drained after 1.5 s, 0 calls run"] * 4


def test_a_worker_that_loads_its_model_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is taken, and nobody takes what comes there."""
    monkeypatch.setattr(drain, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert run("worker", "--worker-port", port, "--worker-secret", "hush") == Exit.CRASHED
    assert "does not answer" in capsys.readouterr().err


def test_something_that_is_no_paddock_answers(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.body = b"<html>"
    assert run("gateway", "--port", str(asked.server_port), "--gateway-secret", "hush") == Exit.CRASHED
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("worker", "--worker-secret", "hush"), "worker_port is 0"),
        (("gateway", "--url", "ftp://x", "--gateway-secret", "hush"), "no address"),
        (("redis",), "'redis' is not known; use one of: gateway, worker"),
        ((), "required"),
        (("gateway", "--timeout-s", "soon"), "--timeout-s: it must be a number of seconds from 0 to 86400"),
        (("gateway", "--timeout-s", "nan", "--url", "http://127.0.0.1:1", "--gateway-secret", "hush"), "and is 'nan'"),
        (("worker", "--settle-s", "1e9", "--url", "http://127.0.0.1:1", "--worker-secret", "hush"), "and is '1e9'"),
        (("gateway", "--prot", "1"), "--prot"),
        (("gateway", "--state-dir", "/nowhere"), "--gateway-secret"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == Exit.USAGE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "75 something still" in capsys.readouterr().out
