"""A server on a real socket that says what a test wrote down, one reply per request, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

LEAVING_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Reply:
    """`pieces` make it a stream of events: each is sent by itself."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs_up: bool = False
    """No answer: the connection is closed."""
    pieces: tuple[bytes, ...] | None = None
    ending: Literal["whole", "cut", "open"] = "whole"
    """whole: in good order; cut: the connection is dropped; open: silence until the client leaves."""


@dataclass(slots=True)
class ScriptedServer:
    """Replies are taken from the front; the last one is said again and again."""

    url: str
    replies: list[Reply] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client has left a stream that was open."""

    def says(self, *documents: Any, **more: Any) -> None:
        """The next replies, each a JSON document."""
        self.replies = [Reply(json.dumps(document).encode(), **more) for document in documents]

    def streams(self, *pieces: bytes | str, **more: Any) -> None:
        """The next reply, a stream of these pieces."""
        self.replies = [stream(*pieces, **more)]

    def next(self) -> Reply:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def stream(*pieces: bytes | str, **more: Any) -> Reply:
    raw = tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
    return Reply(pieces=raw, **more)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        script = ScriptedServer(f"http://127.0.0.1:{listening.server_address[1]}")
        listening.daemon_threads = True
        listening.script = script  # type: ignore[attr-defined]
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield script
        finally:
            listening.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        script: ScriptedServer = self.server.script  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        script.asked.append(Asked(self.command, url.path, dict(parse_qsl(url.query)), headers, body))
        reply = script.next()
        if reply.hangs_up:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.pieces is None:
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)
            return
        self.send_header("content-type", reply.headers.get("content-type", "text/event-stream"))
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._stream(script, reply)

    def _stream(self, script: ScriptedServer, reply: Reply) -> None:
        for piece in reply.pieces or ():
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        if reply.ending == "whole":
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True
        if reply.ending == "open":
            self.connection.settimeout(LEAVING_S)
            with suppress(ConnectionResetError):
                assert self.connection.recv(1) == b""
            script.left.set()
