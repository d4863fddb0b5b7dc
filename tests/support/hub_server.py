"""A hub of models on loopback: as much of the Hugging Face hub's HTTP as its Python library asks for.

Repositories are dictionaries {"owner/name": {"path": bytes}}; those in `gated` answer as gated ones do, unless the
right token comes along. Every request is remembered in `requests` as "METHOD path". With `pause_after`, a file's body
stops there and does not go on before the hub is closed. `history` has repositories at other commits than the newest,
`forged` what is sent in place of a file's content.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TAGGED = "f" * 40
"""The commit of every tag in `history`."""
TOKEN = "hf_token_of_the_test"


@dataclass(slots=True)
class Hub:
    """Use as a context manager; `environment` points the library at it."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    newest: str = COMMIT
    """Of all repositories."""
    claims: str = ""
    """The commit that it says it answers with, whatever is asked; empty: the true one."""
    requests: list[str] = field(default_factory=list)
    history: Mapping[str, Mapping[str, Mapping[str, bytes]]] = field(default_factory=dict)
    """Commit or tag -> repository -> files."""
    forged: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> what is sent in place of the file that is described."""
    etag: str = ""
    """What it says that names the contents of every file; empty: their SHA-256."""
    ranges: list[str] = field(default_factory=list)
    """The ranges that were asked for."""
    pause_after: int = 0
    paused: bool = False
    closed: threading.Event = field(default_factory=threading.Event)
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.server is not None
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the test reads `requests`."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        api = path.startswith("/api/models/")
        words = path.removeprefix("/api/models/").lstrip("/").split("/")
        repository = "/".join(words[:2])
        files = self.hub.repositories.get(repository)
        revision = words[3] if words[2:3] in (["revision"], ["resolve"]) else "main"
        if files is not None and revision not in ("main", self.hub.newest):
            files = self.hub.history.get(revision, {}).get(repository)
            if files is None:
                self._refuse(404, "RevisionNotFound", "Revision not found")
                return
        commit = revision if len(revision) == len(COMMIT) else self.hub.newest if revision == "main" else TAGGED
        if files is None:
            self._refuse(401 if not self._has_token() else 404, "RepoNotFound", "Repository not found")
        elif api and words[2:3] == ["tree"]:
            self._send(json.dumps([_entry(name, content) for name, content in files.items()]).encode())
        elif api:
            siblings = [{"rfilename": name} for name in files]
            self._send(json.dumps({"id": repository, "sha": self.hub.claims or commit, "siblings": siblings}).encode())
        elif repository in self.hub.gated and not self._has_token():
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif words[2:3] == ["resolve"] and (content := files.get("/".join(words[4:]))) is not None:
            self._file(content, commit, self.hub.forged.get(words[-1], content))
        else:
            self._refuse(404, "EntryNotFound", "Entry not found")

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _file(self, content: bytes, commit: str, sent: bytes) -> None:
        first = 0
        if wanted := self.headers.get("Range"):
            self.hub.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {
            "ETag": f'"{self.hub.etag or hashlib.sha256(content).hexdigest()}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(sent[first:], 206 if first else 200, **headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(b"{}", status, **{"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._write(body)

    def _write(self, body: bytes) -> None:
        pause = self.hub.pause_after
        if not 0 < pause < len(body):
            self.wfile.write(body)
            return
        self.wfile.write(body[:pause])
        self.wfile.flush()
        self.hub.paused = True
        self.hub.closed.wait(30)


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
