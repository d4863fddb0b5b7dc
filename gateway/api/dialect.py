"""The interfaces of a dialect, one public API such as OpenAI's: it reads requests and writes answers and errors.

A dialect imports the canonical request and events, and no other dialect. `gateway.api.responder` calls it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.api.http.streaming import Written
from gateway.call import Call, Principal
from gateway.errors import PaddockError
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import CallEvent
from workers.protocol.requests import GenerateRequest

SHAPE = "paddock.shape"
"""Key of the ASGI scope for the route's `ErrorShape`; it is OpenAI's until a route is found."""

ROUTE = "paddock.route"
"""Key of the ASGI scope for the route's path, with `{names}` for variable parts; absent until a route is found."""

Headers = list[tuple[bytes, bytes]]

Handler = Callable[[Principal, Scope, Receive, Send], Awaitable[None]]
"""Answers a route's requests like an ASGI app; its first argument is the caller, whose access was checked before.

Every handler is a function or method of this type. `gateway.api.call_handlers` makes those that call a model."""


class ErrorShape(Protocol):
    """Writes an error as a whole response in a dialect, if nothing was sent before. Stateless."""

    def status(self, error: PaddockError) -> int: ...

    def body(self, error: PaddockError, request_log: RequestLog) -> bytes:
        """Return the body of the response, a JSON object."""
        ...


class DialectRequest(Protocol):
    """A parsed request of one dialect: a frozen value, which the dialect's writers get as well."""

    @property
    def model(self) -> str:
        """The model name that the caller sent; empty: the caller sent none."""
        ...

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        """One canonical request per answer: `n` or several prompts ask for several, generated at the same time."""
        ...

    @property
    def stream(self) -> bool: ...


class StreamWriter(Protocol):
    """Writes one streamed response as whole server-sent events. Methods return empty bytes if there is nothing to send.

    `chunks` runs once per token. It must write nothing for a `Failed` event: `broken` is called with that error."""

    def opening(self) -> bytes:
        """Return the first events. Called once, when the first answer has begun."""
        ...

    def chunks(self, events: list[CallEvent], choice: int) -> Written:
        """Return events in the dialect's form. `choice`: index of their answer in `DialectRequest.requests`."""
        ...

    def idle(self) -> bytes:
        """Return events without content, to keep the stream alive for clients that take comments for events. It can be
        called before `opening`."""
        ...

    def closing(self) -> Written:
        """Return the last events. Called once, when every answer has ended."""
        ...

    def broken(self, error: PaddockError) -> Written:
        """Return the last events of a stream that ends early, with the error. It can be called without `opening`."""
        ...


class WholeWriter(Protocol):
    """Collects the answers to a request, for a response that is sent whole."""

    @property
    def content_type(self) -> bytes:
        """The content type of the response."""
        ...

    def add(self, events: list[CallEvent], choice: int) -> None: ...

    def parts(self) -> Iterator[bytes]:
        """Yield the response in one or more parts. Called when every answer has ended."""
        ...


RequestT = TypeVar("RequestT", bound=DialectRequest)
RequestIn = TypeVar("RequestIn", bound=DialectRequest, contravariant=True)


class Writers(Protocol[RequestIn]):
    """Makes the writers of answers. Stateless."""

    def stream_writer(self, asked: RequestIn, call: Call, request_log: RequestLog) -> StreamWriter: ...

    def whole_writer(self, asked: RequestIn, call: Call, request_log: RequestLog) -> WholeWriter: ...


class Dialect(Writers[RequestT], Protocol[RequestT]):
    """Reads requests for generated text in one dialect, and makes the writers of their answers. Stateless."""

    def read(self, raw: bytes, scope: Scope) -> RequestT:
        """Return the parsed request. Raises PaddockError for what is invalid or not supported, naming the parameter."""
        ...
