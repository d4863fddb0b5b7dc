"""Represents a call as an object: the request to send, and how to read its answer. Nothing here does I/O."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import msgspec

from gateway.client.errors import UnexpectedAnswer, refusal

T = TypeVar("T")

MIN_GRACE_S = 1
MAX_GRACE_S = 60


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A call whose answer is not streamed."""

    method: str
    path: str
    read: Callable[[bytes], T]
    """Reads the body of the answer. Raises msgspec.MsgspecError if it has not the expected form."""
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    """The content type of `body`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of this call alone."""
    read_at: frozenset[int] = frozenset()
    """Statuses outside 200 to 299 whose body counts as an answer, not as an error."""
    patience_s: float | None = None
    """The call fails after this many seconds without a byte from the server, or after the client's `timeout` if that is
    shorter; None: only the client's `timeout` counts."""


@dataclass(frozen=True, slots=True)
class StreamRequest(Generic[T]):
    """A call (POST) whose answer is a stream of events."""

    path: str
    body: bytes
    read: Callable[[bytes], T]
    last: Callable[[T], bool]
    """Returns whether the stream may end after this item. It may always end after `[DONE]`."""
    resume_grace: int | None = None
    """Seconds for which the server keeps the stream if its connection breaks; None: it can't be resumed."""

    def __post_init__(self) -> None:
        grace = self.resume_grace
        if grace is not None and not MIN_GRACE_S <= grace <= MAX_GRACE_S:
            raise ValueError(f"resume_grace is {grace}; it takes {MIN_GRACE_S} to {MAX_GRACE_S} seconds, or None")


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a `Script`: wait for this many seconds."""

    seconds: float


Script = Generator[Request[Any] | Pause, Any, T]
"""A generator that makes several calls. It yields each request or pause; the client sends it the answer, or throws the
ClientError into it. Its return value is the result."""


def encode_body(values: Mapping[str, Any]) -> bytes:
    """Return the values that are not None as a JSON body. Raises TypeError for a value that JSON can't express."""
    return msgspec.json.encode({name: value for name, value in values.items() if value is not None})


def encode_form(values: Mapping[str, Any], file: bytes) -> tuple[bytes, str]:
    """Return a form (RFC 7578) of the values that are not None and a file, and its content type with the boundary.

    A text is sent as it is, anything else as JSON. Raises TypeError for a value that JSON can't express."""
    boundary = secrets.token_hex(16)
    parts: list[bytes] = []
    for name, value in values.items():
        if value is not None:
            text = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
            parts.append(_part(boundary, f'name="{name}"', text))
    parts.append(_part(boundary, 'name="file"; filename="file"', file))
    return b"".join((*parts, f"--{boundary}--\r\n".encode())), f"multipart/form-data; boundary={boundary}"


def _part(boundary: str, names: str, data: bytes) -> bytes:
    head = f"--{boundary}\r\nContent-Disposition: form-data; {names}\r\n\r\n"
    return b"%b%b\r\n" % (head.encode(), data)


def read_answer(request: Request[T], status: int, headers: Mapping[str, str], body: bytes) -> T:
    """Read the answer from the parts of an HTTP response. Raises AnswerError, UnexpectedAnswer."""
    if not 200 <= status < 300 and status not in request.read_at:
        raise refusal(status, headers, body)
    try:
        return request.read(body)
    except msgspec.MsgspecError as error:
        raise unexpected(f"{request.method} {request.path}", body, error) from None


def unexpected(what: str, body: bytes, why: Exception) -> UnexpectedAnswer:
    begin = body[:80].decode("utf-8", "replace")
    return UnexpectedAnswer(
        f"the answer to {what} can't be read ({why}); it begins with {begin!r}. Check the base URL."
    )


P = ParamSpec("P")

Send = Callable[[Request[Any]], Any]


class Sender:
    """The base of the classes whose methods are calls. The methods raise ClientError.

    `make_method` and `make_async_method` make a method from the function that builds its request: with the same
    keywords, types and docstring. `send` returns the answer in `Client`, an awaitable of the answer in `AsyncClient`.
    """

    def __init__(self, send: Send) -> None:
        self._send = send


def make_method(build: Callable[P, Request[T]]) -> Callable[Concatenate[Sender, P], T]:
    """Return a method that makes the call and returns its answer."""
    return _method(build)


def make_async_method(build: Callable[P, Request[T]]) -> Callable[Concatenate[Sender, P], Awaitable[T]]:
    """Return a method that makes the call and returns an awaitable of its answer."""
    return _method(build)


def _method(build: Callable[P, Request[Any]]) -> Callable[Concatenate[Sender, P], Any]:
    def method(self: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._send(build(*args, **kwargs))

    method.__name__ = build.__name__
    method.__doc__ = build.__doc__
    signature = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = str(signature.return_annotation).removeprefix("Request[").removesuffix("]")
    shown = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=answer)
    # `help` shows it; type checkers do not know this attribute of functions.
    setattr(method, "__signature__", shown)  # noqa: B010
    return method
