"""The program that brings a model from a URL: whole, or not at all, and not twice."""

from __future__ import annotations

import hashlib
import json
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
OLD = b"GGUF of another model"
ELSEWHERE = "http://127.0.0.1:9/older.gguf"


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


def put(target: Path, content: bytes, *note: str) -> None:
    """A file that is there already; with the URL and the SHA-256 that it was brought for."""
    target.write_bytes(content)
    if note:
        source(target).write_text(json.dumps(note))


def source(target: Path) -> Path:
    return target.with_name(f"{target.name}.source")


def holds(pid: int, file: Path) -> bool:
    """Whether a process has it open."""
    return any(each.exists() and each.readlink() == file for each in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("sha256", ["", SHA256, SHA256.upper()])
def test_it_comes_whole(site: Site, tmp_path: Path, sha256: str) -> None:
    target = tmp_path / "m.gguf"
    assert download(site, target, sha256).returncode == 0
    assert target.read_bytes() == CONTENT
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.gguf.lock", "m.gguf.source"}
    assert json.loads(source(target).read_text()) == [site.url, sha256.lower()]


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


@pytest.mark.parametrize(
    ("note", "sha256"),
    [
        pytest.param(("URL", ""), "", id="the same URL"),
        pytest.param(("URL", SHA256), SHA256.upper(), id="both the same"),
        pytest.param((ELSEWHERE, SHA256), SHA256, id="a mirror of the same content"),
        pytest.param(("URL", SHA256), "", id="the digest is asked for no more"),
    ],
)
def test_what_is_there_is_not_asked_for(site: Site, tmp_path: Path, note: tuple[str, str], sha256: str) -> None:
    target = tmp_path / "m.gguf"
    put(target, OLD, note[0].replace("URL", site.url), note[1])
    assert download(site, target, sha256).returncode == 0
    assert (target.read_bytes(), site.asked) == (OLD, [])
    assert not target.with_name("m.gguf.lock").exists(), "it has to do on a volume that can only be read"


@pytest.mark.parametrize(
    ("note", "sha256"),
    [
        pytest.param((ELSEWHERE, ""), "", id="another URL"),
        pytest.param((ELSEWHERE, "0" * 64), "", id="another URL, without the digest"),
        pytest.param(("URL", "0" * 64), SHA256, id="another digest"),
        pytest.param((ELSEWHERE, ""), SHA256, id="another URL, and a digest"),
        pytest.param(("URL", ""), SHA256, id="a digest that it has not"),
        pytest.param((), SHA256, id="a digest that one of unknown origin has not"),
    ],
)
def test_one_that_was_brought_for_something_else_is_replaced(
    site: Site, tmp_path: Path, note: tuple[str, ...], sha256: str
) -> None:
    target = tmp_path / "m.gguf"
    put(target, OLD, *(word.replace("URL", site.url) for word in note))
    with target.open("rb") as mapped:
        assert download(site, target, sha256).returncode == 0
        assert mapped.read() == OLD, "a worker that runs keeps its own"
    assert target.read_bytes() == CONTENT
    assert json.loads(source(target).read_text()) == [site.url, sha256]
    assert download(site, target, sha256).returncode == 0
    assert site.asked == [""]
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.gguf.lock", "m.gguf.source"}


def test_an_old_file_serves_until_its_successor_is_whole(site: Site, tmp_path: Path) -> None:
    target, site.breaks_at = tmp_path / "m.gguf", 700_000
    put(target, OLD, ELSEWHERE, "")
    assert download(site, target).returncode == 1
    assert target.read_bytes() == OLD
    site.breaks_at = 0
    assert download(site, target).returncode == 0
    assert target.read_bytes() == CONTENT
    assert site.asked == ["", "bytes=700000-"]


@pytest.mark.parametrize("sha256", ["", SHA256])
@pytest.mark.parametrize("spoilt", ["", "{}", "null"])
def test_one_of_unknown_origin_is_taken_and_noted(site: Site, tmp_path: Path, sha256: str, spoilt: str) -> None:
    """From an older version, or put there by hand."""
    target = tmp_path / "m.gguf"
    put(target, CONTENT)
    if spoilt:
        source(target).write_text(spoilt)
    assert download(site, target, sha256).returncode == 0
    assert site.asked == []
    assert json.loads(source(target).read_text()) == [site.url, sha256]


@pytest.mark.parametrize("sha256", ["", SHA256])
def test_a_volume_without_locks_will_do_where_nothing_is_missing(site: Site, tmp_path: Path, sha256: str) -> None:
    target = tmp_path / "m.gguf"
    put(target, CONTENT)
    target.with_name("m.gguf.lock").mkdir()
    assert download(site, target, sha256).returncode == 0
    target.unlink()
    refused = download(site, target, sha256)
    assert refused.returncode == 1
    assert "the volume must be writable and know locks" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert site.asked == []


@pytest.mark.parametrize(
    ("note", "sha256", "asked"),
    [
        pytest.param((ELSEWHERE, ""), "", "", id="of another URL"),
        pytest.param((ELSEWHERE, ""), SHA256, "", id="of another URL, and a digest"),
        pytest.param(("URL", "0" * 64), SHA256, "", id="of another digest"),
        pytest.param((), "", "", id="of unknown origin"),
        pytest.param((), SHA256, "bytes=700000-", id="of unknown origin, and a digest that decides in the end"),
        pytest.param((ELSEWHERE, SHA256), SHA256, "bytes=700000-", id="of the same digest"),
    ],
)
def test_what_came_from_elsewhere_is_not_gone_on_with(
    site: Site, tmp_path: Path, note: tuple[str, ...], sha256: str, asked: str
) -> None:
    target, partial = tmp_path / "m.gguf", tmp_path / "m.gguf.part"
    put(partial, CONTENT[:700_000] if asked else OLD, *(word.replace("URL", site.url) for word in note))
    assert download(site, target, sha256).returncode == 0
    assert target.read_bytes() == CONTENT
    assert site.asked == [asked]
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.gguf.lock", "m.gguf.source"}


def test_another_file_is_never_served(site: Site, tmp_path: Path) -> None:
    done = download(site, tmp_path / "m.gguf", "0" * 64)
    assert done.returncode == 1
    assert f"its SHA-256 is {SHA256}, and not {'0' * 64}; correct models[].sha256 or the address" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf.lock"}


@pytest.mark.parametrize("there", [False, True], ids=["a new file", "in place of another"])
def test_of_two_pods_on_one_volume_one_brings_it(site: Site, tmp_path: Path, there: bool) -> None:
    target, lock = tmp_path / "m.gguf", tmp_path / "m.gguf.lock"
    if there:
        put(target, OLD, ELSEWHERE, "")
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
