"""The program that brings a model from a URL: whole, or not at all, and not twice."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.chart import CHART

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """The ranges that were asked for."""
    breaks_at: int = 0
    is_open: threading.Event = field(default_factory=threading.Event)
    """Not set: half of the file goes out, and the rest waits."""


@pytest.fixture
def site() -> Iterator[Site]:
    """One file; with `breaks_at` the connection ends there."""
    told = Site()
    told.is_open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("range", "")
            told.asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-") or 0)
            if start >= len(CONTENT):
                self.send_error(416)
                return
            self.send_response(206 if wanted else 200)
            self.send_header("content-length", str(len(CONTENT) - start))
            self.end_headers()
            half = len(CONTENT) // 2
            self.wfile.write(CONTENT[start : told.breaks_at or half])
            if not told.breaks_at:
                told.is_open.wait(30)
                self.wfile.write(CONTENT[max(start, half) :])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}/m.gguf"
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


def command(site: Site, target: Path, sha256: str = "") -> list[str]:
    script = (CHART / "files" / "hooks" / "download.py").read_text()
    return [sys.executable, "-I", "-c", script, site.url, str(target), sha256]


def download(site: Site, target: Path, sha256: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(site, target, sha256), capture_output=True, text=True, timeout=60)


def holds(pid: int, file: Path) -> bool:
    """Whether a process has it open."""
    return any(each.exists() and each.readlink() == file for each in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("sha256", ["", SHA256, SHA256.upper()])
def test_it_comes_whole(site: Site, tmp_path: Path, sha256: str) -> None:
    target = tmp_path / "m.gguf"
    assert download(site, target, sha256).returncode == 0
    assert target.read_bytes() == CONTENT
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.gguf.lock"}


def test_it_goes_on_where_it_ended(site: Site, tmp_path: Path) -> None:
    target, site.breaks_at = tmp_path / "m.gguf", 700_000
    broken = download(site, target, SHA256)
    assert broken.returncode == 1
    assert "goes on where this one ended" in broken.stderr
    assert not target.exists()
    site.breaks_at = 0
    assert download(site, target, SHA256).returncode == 0
    assert target.read_bytes() == CONTENT
    assert site.asked == ["", "bytes=700000-"]


def test_one_that_came_whole_before_is_taken(site: Site, tmp_path: Path) -> None:
    """A pod that was ended between the last byte and the new name."""
    (tmp_path / "m.gguf.part").write_bytes(CONTENT)
    assert download(site, tmp_path / "m.gguf", SHA256).returncode == 0
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_what_is_there_is_not_asked_for(site: Site, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert download(site, tmp_path / "m.gguf", SHA256).returncode == 0
    assert site.asked == []


def test_another_file_is_never_served(site: Site, tmp_path: Path) -> None:
    done = download(site, tmp_path / "m.gguf", "0" * 64)
    assert done.returncode == 1
    assert f"its SHA-256 is {SHA256}, and not {'0' * 64}; correct models[].sha256 or the address" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf.lock"}


def test_of_two_pods_on_one_volume_one_brings_it(site: Site, tmp_path: Path) -> None:
    target, lock = tmp_path / "m.gguf", tmp_path / "m.gguf.lock"
    site.is_open.clear()
    end = time.monotonic() + 30
    with subprocess.Popen(command(site, target, SHA256)) as first:
        while not site.asked and time.monotonic() < end:
            time.sleep(0.01)
        with subprocess.Popen(command(site, target, SHA256)) as second:
            while not holds(second.pid, lock) and len(site.asked) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            site.is_open.set()
    assert (first.returncode, second.returncode) == (0, 0)
    assert target.read_bytes() == CONTENT
    assert site.asked == [""]
