"""Serves the console's files, which lie in `static` as `npm run build` in `web` makes them.

The page may run no script, and reach no address, but this gateway's own (CSP, level 3), and nobody may frame it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_last
from gateway.api.http.diagnostics import answer_headers, request_log_of
from gateway.call import Principal
from gateway.errors import NotFound, NotSupported
from gateway.telemetry.metrics import OK

STATIC = Path(__file__).parent / "static"
PATH = "/ui"
KINDS = {".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8", ".svg": b"image/svg+xml"}
HTML = b"text/html; charset=utf-8"
PAGE = "index.html"

CSP = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = [
    (b"content-security-policy", CSP),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # asked for again with its tag, and not sent again if it is the same
]


@dataclass(frozen=True, slots=True)
class _File:
    kind: bytes
    content: bytes
    tag: bytes
    """The `ETag` of the content."""


class ConsoleFiles:
    """The files, read once. Anybody may have them: they show nothing without a session."""

    def __init__(self, folder: Path = STATIC) -> None:
        """`folder`: where the built files lie. Raises OSError."""
        self._files = {
            path.name: _read(path, KINDS.get(path.suffix, HTML)) for path in sorted(folder.iterdir()) if path.is_file()
        }

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the page, or with the file that the path names. Raises NotFound."""
        name = scope.get("path_params", {}).get("file") or PAGE
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"The console has no file of this name. Open {PATH}.")
        request_log = request_log_of(scope)
        is_known = any(key == b"if-none-match" and file.tag in value for key, value in scope["headers"])
        request_log.status, request_log.outcome = 304 if is_known else 200, OK
        headers = [*HEADERS, (b"etag", file.tag), *answer_headers(request_log)]
        if not is_known:
            headers += [(b"content-type", file.kind), (b"content-length", b"%d" % len(file.content))]
        await send({"type": "http.response.start", "status": request_log.status, "headers": headers})
        await send_last(send, b"" if is_known else file.content)


async def lead_to_console(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `GET /` with where the console is."""
    request_log = request_log_of(scope)
    request_log.status, request_log.outcome = 303, OK
    headers = [(b"location", PATH.encode()), (b"content-length", b"0"), *answer_headers(request_log)]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send_last(send, b"")


async def refuse_console(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse every request for the console, because the operator has switched it off."""
    raise NotSupported("This gateway has no console. An operator can switch it on: PADDOCK_CONSOLE.")


def _read(path: Path, kind: bytes) -> _File:
    content = path.read_bytes()
    return _File(kind, content, b'"%b"' % hashlib.sha256(content).hexdigest()[:32].encode())
