"""`make images-lock` against a registry on loopback that speaks as much of the distribution API as a digest takes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.compose import ROOT
from tests.support.dockerfile import PINNED, read

TOKEN = "for-anybody"
TAGS = {
    "library/python": "3.12.12-slim-bookworm",
    "library/redis": "7.4.2-bookworm",
    "library/postgres": "17.6-bookworm",
    "prom/prometheus": "v3.5.0",
    "grafana/grafana": "12.1.0",
}
CUDA = {"12.8.1-devel-ubuntu24.04", "12.8.1-runtime-ubuntu24.04"}


@dataclass(slots=True)
class Registry:
    """Every tag of our files, with a manifest of its own."""

    edition: int = 1
    lies: bool = False
    missing: set[str] = field(default_factory=set)
    url: str = ""

    def manifest(self, repository: str, tag: str) -> bytes | None:
        known = tag in CUDA if repository == "nvidia/cuda" else TAGS.get(repository) == tag
        if not known or repository in self.missing:
            return None
        return json.dumps({"schemaVersion": 2, "of": f"{repository}:{tag}", "edition": self.edition}).encode()

    def digest(self, repository: str, tag: str) -> str:
        return f"sha256:{hashlib.sha256(self.manifest(repository, tag) or b'').hexdigest()}"


class _Handler(BaseHTTPRequestHandler):
    registry: Registry

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/token":
            scope = parse_qs(parts.query)["scope"][0]
            self._send(200, json.dumps({"token": f"{TOKEN} {scope}"}).encode())
            return
        repository, _, tag = parts.path.removeprefix("/v2/").partition("/manifests/")
        scope = f"repository:{repository}:pull"
        if self.headers.get("Authorization") != f"Bearer {TOKEN} {scope}":
            challenge = f'Bearer realm="{self.registry.url}/token",service="here",scope="{scope}"'
            self._send(401, b"{}", {"WWW-Authenticate": challenge})
            return
        manifest = self.registry.manifest(repository, tag)
        if manifest is None or "oci.image.index" not in self.headers.get("Accept", ""):
            self._send(404, b"{}")
            return
        told = self.registry.digest(repository, tag) if not self.registry.lies else f"sha256:{'0' * 64}"
        self._send(200, manifest, {"Docker-Content-Digest": told})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def registry() -> Iterator[Registry]:
    told = Registry()

    class Handler(_Handler):
        registry = told

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield told
    server.shutdown()
    server.server_close()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("deploy", "helm"):
        (tmp_path / name).mkdir()
    shutil.copytree(ROOT / "deploy" / "docker", tmp_path / "deploy" / "docker")
    for name in ("docker-compose.yml", "helm/values.yaml", "deploy/images_lock.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def lock(checkout: Path, url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "deploy" / "images_lock.py"), "--registry", f"docker.io={url}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def contents(checkout: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(checkout.rglob("*")) if path.is_file()}


def test_every_image_gets_its_digest_and_a_new_one_later(checkout: Path, registry: Registry) -> None:
    for edition in (1, 2):
        registry.edition = edition
        done = lock(checkout, registry.url)
        assert done.returncode == 0, done.stderr
        bases = {
            stage.base
            for path in sorted((checkout / "deploy" / "docker").glob("*.Dockerfile"))
            for stage in read(path).stages
            if ":" in stage.base
        }
        assert bases == {
            f"python:3.12.12-slim-bookworm@{registry.digest('library/python', '3.12.12-slim-bookworm')}",
            *(f"nvidia/cuda:{tag}@{registry.digest('nvidia/cuda', tag)}" for tag in CUDA),
        }
        assert all(PINNED.fullmatch(base) for base in bases)
        compose = (checkout / "docker-compose.yml").read_text()
        for repository in ("library/redis", "library/postgres", "prom/prometheus", "grafana/grafana"):
            tag = TAGS[repository]
            name = repository.removeprefix("library/")
            assert f"    image: {name}:{tag}@{registry.digest(repository, tag)}\n" in compose
        redis = f"  image: redis:7.4.2-bookworm@{registry.digest('library/redis', '7.4.2-bookworm')}\n"
        assert redis in (checkout / "helm" / "values.yaml").read_text()
        postgres = f"postgres:17.6-bookworm@{registry.digest('library/postgres', '17.6-bookworm')}"
        assert postgres in (checkout / "helm" / "values.yaml").read_text()
        assert "image: paddock-gateway:${PADDOCK_VERSION:-0.1.0}\n" in compose
        assert lock(checkout, registry.url, "--check").returncode == 0
    before = contents(checkout)
    registry.edition = 3
    moved = lock(checkout, registry.url, "--check")
    assert moved.returncode == 1
    assert "make images-lock" in moved.stderr
    assert contents(checkout) == before


def test_where_something_is_wrong_nothing_is_written(checkout: Path, registry: Registry) -> None:
    before = contents(checkout)
    for wrong, code, said in (
        ({"missing": {"prom/prometheus"}}, 2, "prom/prometheus:v3.5.0: its registry has no such image or tag"),
        ({"lies": True}, 1, "do not trust it"),
        ({"url": "http://127.0.0.1:9"}, 1, "run this where the registry is reachable, or name a mirror"),
    ):
        for name, value in wrong.items():
            setattr(registry, name, value)
        done = lock(checkout, registry.url)
        assert (done.returncode, contents(checkout)) == (code, before)
        assert said in done.stderr
        assert "Nothing was written" in done.stderr
        assert "Traceback" not in done.stderr
        registry.missing, registry.lies = set(), False


def test_offline_every_tag_without_its_digest_is_named(checkout: Path, registry: Registry) -> None:
    nowhere = "http://127.0.0.1:9"
    done = lock(checkout, nowhere, "--offline")
    assert done.returncode == 1
    assert "redis:7.4.2-bookworm is named by its tag only" in done.stderr
    assert lock(checkout, registry.url).returncode == 0
    done = lock(checkout, nowhere, "--offline")
    assert (done.returncode, done.stderr) == (0, "")
    values = checkout / "helm" / "values.yaml"
    for other in ("", f"@sha256:{'0' * 64}"):
        was = values.read_text()
        values.write_text(re.sub(r"(image: redis:[^@\s]+)(@sha256:\w+)?", rf"\1{other}", was))
        done = lock(checkout, nowhere, "--offline")
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "images-lock: redis:7.4.2-bookworm has a digest here and none, or another, there; `make images-lock` "
            "writes one in all"
        ]


def test_an_image_whose_digest_is_known_has_it_in_all_files() -> None:
    """Of the checkout itself: all tags of an image are pinned, or none is."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "images_lock.py"), "--offline"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "has a digest here and none" not in done.stderr
