"""A reverse proxy that keeps each request it hands on, without the key and what is of the machine that it ran on."""

from __future__ import annotations

import getpass
import http.client
import json
import platform
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.clients.recording import Sent

KEPT_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta", "openai-beta")
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length")
LONGEST = 100
"""Characters of a text of the program's own, such as its system prompt, that are kept."""
LONGEST_DESCRIPTION = 40
"""The same of a tool or one of its parameters."""
UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
ANY_UUID = "00000000-0000-4000-8000-000000000000"
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Recorder:
    """Point a program at `url`; what it sends is in `calls` then, in the order in which it came."""

    url: str
    gateway: str
    key: str
    calls: list[Sent] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """What the gateway answered with a status of 400 or more."""
    answer_ids: dict[str, int] = field(default_factory=dict)
    """Id of a stored answer -> the number of the call that it answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, method: str, path: str, headers: dict[str, str], body: bytes) -> int:
        """Return the number of the call."""
        bearer = headers.get("authorization", "").lower().startswith("bearer ")
        where: dict[tuple[bool, bool], Literal["bearer", "x-api-key", "both", "none"]] = {
            (True, True): "both",
            (True, False): "bearer",
            (False, True): "x-api-key",
        }
        kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        if kept.get("accept") in ("*/*", "application/json"):
            del kept["accept"]
        document = json.loads(body) if body else None
        with self.lock:
            key = where.get((bearer, "x-api-key" in headers), "none")
            self.calls.append(Sent(method, self._clean(path), kept, key, self._clean(document)))
            return len(self.calls) - 1

    def learn(self, number: int, answer: bytes) -> None:
        """Take the answer's id, which a later request may name."""
        if found := re.search(rb'"id": ?"(resp_[^"]+)"', answer):
            self.answer_ids.setdefault(found[1].decode(), number)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, dict):
            cleaned = {name: self._clean(inner) for name, inner in value.items()}
            if isinstance(text := value.get("description"), str) and len(text) > LONGEST_DESCRIPTION:
                cleaned["description"] = _left_out(text)
            return cleaned
        if isinstance(value, list):
            return [self._clean(inner) for inner in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        if len(text) > LONGEST:
            return _left_out(text)
        for answer_id, number in self.answer_ids.items():
            text = text.replace(answer_id, f"<the id of answer {number}>")
        text = UUID.sub(ANY_UUID, text.replace(self.key, "<key>").replace(self.url, "<address>"))
        folder = rf"{re.escape(tempfile.gettempdir())}(/\w+)?"
        text = re.sub(folder, "<folder>", text.replace(str(Path.home()), "<home>"))
        text = text.replace(platform.node(), "<host>")
        return text if getpass.getuser() == "root" else text.replace(getpass.getuser(), "<user>")


def _left_out(text: str) -> str:
    return f"<{len(text)} characters of the program's own>"


@contextmanager
def recorder(gateway: str, key: str) -> Iterator[Recorder]:
    """Yield a proxy on a free port before the gateway at that URL."""
    with _Server(("127.0.0.1", 0), _Handler) as listening:
        kept = Recorder(f"http://127.0.0.1:{listening.server_address[1]}", gateway, key)
        listening.recorder = kept  # type: ignore[attr-defined]
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield kept
        finally:
            listening.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: programs leave connections, and answers that they have read enough of."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _hand_on(self) -> None:
        recorder: Recorder = self.server.recorder  # type: ignore[attr-defined]
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._body(headers)
        number = recorder.keep(self.command, self.path, headers, body)
        gateway = urlsplit(recorder.gateway)
        upstream = http.client.HTTPConnection(str(gateway.hostname), gateway.port, timeout=TIMEOUT_S)
        passed = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
        # Compressed, an answer's id could not be read.
        passed["accept-encoding"] = "identity"
        try:
            upstream.request(self.command, self.path, body or None, passed)
            self._answer(recorder, number, upstream.getresponse())
        finally:
            upstream.close()

    do_GET = do_POST = do_DELETE = do_PUT = do_HEAD = do_OPTIONS = _hand_on

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, recorder: Recorder, number: int, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in (*HOP_BY_HOP, "date", "server"):
                self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        begin = b""
        while piece := answer.read1(65536):
            begin += piece[: max(0, 4096 - len(begin))]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
            recorder.learn(number, begin)
        self.wfile.write(b"0\r\n\r\n")
        if answer.status >= 400:
            recorder.refusals.append(f"{answer.status} {recorder.calls[number]}: {begin.decode(errors='replace')}")
