"""Declares the client's errors, and translates a server's error body into one of them.

ClientError
├── ConnectionFailed             nothing answers at the address, or the connection broke
│   └── NotConnected             nothing answers, so the request was not sent
├── Timeout                      the server sent nothing for longer than the client's `timeout`
├── NotReady                     `wait_until_ready` gave up
├── UnexpectedAnswer             an answer that can't be read; the address may be another program's
├── StreamBroken                 a streamed answer ended before it was complete
└── AnswerError                  the server refused: status, message, type, param, code, request_id
    ├── BadRequest               400, and every 4xx without a class of its own
    │   └── ContextOverflow        n_prompt_tokens and n_ctx, if the server sends them
    ├── AuthenticationFailed     401
    ├── PermissionDenied         403
    ├── NotFound                 404
    │   └── StreamGone             also a StreamBroken: the server keeps the stream no longer
    ├── RateLimited              429; retry_after
    ├── NotSupported             501
    ├── Unavailable              502, 503, 504, 529; retry_after
    └── ServerError              500, and every 5xx without a class of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

SHOWN_CHARS = 200


class ClientError(Exception):
    """The base of all errors that calls of the client raise. `message` is for a person to read."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConnectionFailed(ClientError):
    pass


class NotConnected(ConnectionFailed):
    pass


class Timeout(ClientError):
    pass


class NotReady(ClientError):
    pass


class UnexpectedAnswer(ClientError):
    pass


class StreamBroken(ClientError):
    pass


class AnswerError(ClientError):
    """The server answered with an error. `status`: the HTTP status; None if the error came in a stream and has none.
    `retry_after`: seconds."""

    def __init__(
        self, message: str, *, status: int | None, detail: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = _text(detail.get("type"))
        self.param = _text(detail.get("param"))
        self.code = _text(detail.get("code"))
        self.request_id = headers.get("x-request-id")
        self.retry_after = _seconds(headers.get("retry-after"))
        self.detail = detail
        """The whole error object of the server's answer."""

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id})" if self.request_id else self.message


class BadRequest(AnswerError):
    pass


class ContextOverflow(BadRequest):
    @property
    def n_prompt_tokens(self) -> int | None:
        return _count(self.detail.get("n_prompt_tokens"))

    @property
    def n_ctx(self) -> int | None:
        return _count(self.detail.get("n_ctx"))


class AuthenticationFailed(AnswerError):
    pass


class PermissionDenied(AnswerError):
    pass


class NotFound(AnswerError):
    pass


class StreamGone(NotFound, StreamBroken):
    pass


class RateLimited(AnswerError):
    pass


class NotSupported(AnswerError):
    pass


class Unavailable(AnswerError):
    pass


class ServerError(AnswerError):
    pass


_BY_STATUS: dict[int, type[AnswerError]] = {
    401: AuthenticationFailed,
    403: PermissionDenied,
    404: NotFound,
    429: RateLimited,
    501: NotSupported,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
    529: Unavailable,
}
_BY_TYPE: dict[str, type[AnswerError]] = {
    "invalid_request_error": BadRequest,
    "authentication_error": AuthenticationFailed,
    "permission_error": PermissionDenied,
    "not_found_error": NotFound,
    "rate_limit_error": RateLimited,
    "not_supported_error": NotSupported,
    "unavailable_error": Unavailable,
}
_BY_WORD: dict[str, type[AnswerError]] = {
    "context_length_exceeded": ContextOverflow,
    "exceed_context_size_error": ContextOverflow,
    "stream_gone": StreamGone,
}
"""Codes and types of error bodies that say more than the HTTP status -> error class. The first is a code of OpenAI's,
the second a type of llama-server's, the third a code of Paddock's."""


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> AnswerError:
    """Return the error for an answer with this HTTP status. The body need not be JSON."""
    detail = _detail(body)
    message = _text(detail.get("message")) or f"HTTP status {status}{_excerpt(body)}"
    return _kind(detail, status)(message, status=status, detail=detail, headers=headers)


def stream_error(event: bytes, headers: Mapping[str, str]) -> AnswerError | None:
    """Return the error that an event of a stream carries; None: it carries none. `headers`: those of the response."""
    if b'"error"' not in event:
        return None
    detail = _detail(event)
    if not detail:
        return None
    code = detail.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    message = _text(detail.get("message")) or "the server broke the stream off with an error"
    return _kind(detail, status)(message, status=status, detail=detail, headers=headers)


def _kind(detail: Mapping[str, Any], status: int | None) -> type[AnswerError]:
    kind = _text(detail.get("type")) or ""
    for word in (_text(detail.get("code")) or "", kind):
        if word in _BY_WORD:
            return _BY_WORD[word]
    if status is None:
        return _BY_TYPE.get(kind, ServerError)
    return _BY_STATUS.get(status, BadRequest if status < 500 else ServerError)


def _detail(body: bytes) -> Mapping[str, Any]:
    """Return the `error` object of a body; for an `error` that is a text, a `message` with it; empty: there is none."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    found = document.get("error") if isinstance(document, dict) else None
    if isinstance(found, str) and found:
        return {"message": found}
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _seconds(value: str | None) -> float | None:
    """Return the seconds in a `retry-after` header; None for a date, which neither Paddock nor llama-server sends."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


def _excerpt(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return f": {text[:SHOWN_CHARS]}" if text else ""
