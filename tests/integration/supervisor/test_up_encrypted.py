"""`paddock up` with TLS and on a Unix socket: it gets ready, and the snippets that it prints work."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.supervisor.conftest import Programs
from workers.protocol.exits import Exit

FLAGS = ("--workers", "1", "--slots", "4", "--alias", "tale")


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate that vouches for itself, as people do on a machine of their own."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=paddock", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2")
    subprocess.run((*made, "-keyout", key, "-out", cert, *names), check=True, capture_output=True)
    return cert, key


def snippets(text: str) -> tuple[str, str]:
    """Return what is printed for the shell and for Python."""
    shell, _, python = text.partition("# in a shell\n")[2].partition("# in Python")
    return shell.strip(), python.partition("\n")[2].partition("Ctrl-C")[0]


def check_snippets(text: str) -> None:
    shell, python = snippets(text)
    curl = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=60)
    assert "data: [DONE]" in curl.stdout, curl.stderr
    told = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert len(told.stdout) > 10


@pytest.mark.parametrize("num_gateways", [1, 2])
def test_up_with_tls(programs: Programs, model: Path, tmp_path: Path, num_gateways: int) -> None:
    cert, key = own_certificate(tmp_path)
    tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--gateways", str(num_gateways))
    up = programs.start("up", "--port", "0", "--model", str(model), *FLAGS, *tls)
    up.until("Ctrl-C stops everything")
    text = up.text()
    assert "address  https://127.0.0.1:" in text
    assert f"--cacert {cert}" in text
    check_snippets(text)


@pytest.mark.parametrize("num_gateways", [1, 2])
def test_up_on_a_unix_socket(programs: Programs, model: Path, tmp_path: Path, num_gateways: int) -> None:
    path = tmp_path / "paddock.sock"
    asked = ("--uds", str(path), "--gateways", str(num_gateways))
    up = programs.start("up", "--model", str(model), *FLAGS, *asked)
    up.until("Ctrl-C stops everything")
    check_snippets(up.text())
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        status = asking.recv(4096).split(b"\r\n")[0]
    assert (b" 200 " in status) == (num_gateways == 1), "several share the socket, and show none there"
    assert up.stop() == 0
    assert not path.exists()


def test_what_can_not_be_used_is_told_before_anything_starts(programs: Programs, model: Path, tmp_path: Path) -> None:
    cert, _ = own_certificate(tmp_path)
    flags = ("--port", "0", "--model", str(model), *FLAGS)
    up = programs.start("up", *flags, "--tls-cert", str(cert), "--tls-key", str(tmp_path / "none"))
    assert up.popen.wait(60) == Exit.USAGE
    assert "none can't be read" in up.text()
    with socket.socket(socket.AF_UNIX) as taken:
        path = tmp_path / "taken.sock"
        taken.bind(str(path))
        taken.listen()
        up = programs.start("up", "--model", str(model), *FLAGS, "--uds", str(path))
        assert up.popen.wait(60) == Exit.PORT_TAKEN
        assert "is in use; give another with --uds" in up.text()
