"""Makes the options that both clients pass to httpx2, sends their requests, and translates httpx2's errors.

A request is sent over a kept connection or a new one. A server may close an idle connection just when the client uses
it again; llama-server does so after each stream. The error that follows says nothing about the request, so the request
is sent again over another connection. No request is sent twice for any other reason.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from gateway.client.errors import ClientError, ConnectionFailed, NotConnected, Timeout
from gateway.client.request import Request, StreamRequest

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0

VerifySsl = bool | str | ssl.SSLContext
"""Whether to check certificates; or the file of certificate authorities to check them with; or an SSL context."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, and the key, timeout and headers for requests to it."""

    base_url: str
    api_key: str = field(repr=False)
    timeout_s: float | None
    """Seconds without a byte from the server after which a call fails; None: no limit. Connecting may take at most this
    long or CONNECT_TIMEOUT_S, whichever is shorter."""
    verify_ssl: VerifySsl
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def root(self) -> str:
        """The base URL without the `/v1` that OpenAI's clients need at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def options(self) -> dict[str, Any]:
        """Return the options for httpx2's clients. Raises ClientError if the key can't be sent, and ConnectionFailed if
        the file `verify_ssl` can't be used."""
        headers = {"user-agent": "paddock-client", **self.headers}
        if self.api_key:
            if not (self.api_key.isascii() and self.api_key.isprintable()):
                raise ClientError(
                    "api_key: it holds a line break or a letter outside of ASCII; give one key, as it was made"
                )
            headers["authorization"] = f"Bearer {self.api_key}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        return {"headers": headers, "timeout": self._timeout(), "verify": self._verify(), "limits": limits}

    def options_of(self, request: Request[Any]) -> dict[str, Any]:
        """Return httpx2's options for one request."""
        options: dict[str, Any] = {"params": dict(request.query), "headers": dict(request.headers)}
        if request.body is not None:
            options["content"] = request.body
            options["headers"]["content-type"] = request.content_type
        if request.patience_s is not None:
            patience_s = request.patience_s if self.timeout_s is None else min(request.patience_s, self.timeout_s)
            options["timeout"] = httpx2.Timeout(patience_s)
        return options

    @contextmanager
    def translating(self, request: Request[Any] | StreamRequest[Any]) -> Iterator[None]:
        """Translate httpx2's errors inside the block into ClientErrors."""
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise self._translate(error, request) from error

    def _translate(self, error: Exception, request: Request[Any] | StreamRequest[Any]) -> ClientError:
        words = str(error) or type(error).__name__
        if isinstance(error, httpx2.UnsupportedProtocol):
            return NotConnected(f"{self.root} is no address of a server: begin it with http:// or https://")
        if isinstance(error, httpx2.ConnectTimeout):
            return Timeout(f"{self.root} took too long to connect to")
        if isinstance(error, httpx2.TimeoutException):
            return Timeout(f"{self.root}{request.path}: no sign of life for longer than the timeout")
        if isinstance(error, httpx2.ConnectError) and "CERTIFICATE" in words:
            return ConnectionFailed(f"{self.root}: {words}; name its authority with verify_ssl='FILE'")
        if isinstance(error, httpx2.ConnectError):
            return NotConnected(f"nothing answers at {self.root} ({words})")
        return ConnectionFailed(f"{self.root}{request.path}: the connection broke ({words})")

    def _timeout(self) -> httpx2.Timeout:
        if self.timeout_s is None:
            return httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        return httpx2.Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_TIMEOUT_S))

    def _verify(self) -> ssl.SSLContext | bool:
        if not isinstance(self.verify_ssl, str):
            return self.verify_ssl
        try:
            return ssl.create_default_context(cafile=self.verify_ssl)
        except OSError as error:
            raise ConnectionFailed(f"verify_ssl: {self.verify_ssl}: {error}; name a PEM file") from None


CLOSED = (httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.WriteError)
"""Errors that httpx2 raises if the server has closed the connection."""


class _Trace:
    """Notes whether httpx2 makes a new connection for a request."""

    def __init__(self) -> None:
        self.is_new = False

    def note(self, event: str, _: Any) -> None:
        self.is_new = self.is_new or "connect_" in event

    async def note_async(self, event: str, _: Any) -> None:
        self.note(event, _)


def exchange(http: httpx2.Client, request: httpx2.Request) -> httpx2.Response:
    """Send a request (again if a kept connection was closed); return the response before its body is read. Raises
    httpx2.HTTPError."""
    while True:
        trace = _Trace()
        request.extensions["trace"] = trace.note
        try:
            return http.send(request, stream=True)
        except CLOSED:
            if trace.is_new:
                raise


async def exchange_async(http: httpx2.AsyncClient, request: httpx2.Request) -> httpx2.Response:
    """Do for asyncio tasks what `exchange` does."""
    while True:
        trace = _Trace()
        request.extensions["trace"] = trace.note_async
        try:
            return await http.send(request, stream=True)
        except CLOSED:
            if trace.is_new:
                raise
