"""The interfaces of a dialect: how its requests are read, how its answers and its errors are written.

A dialect imports the canonical request and events and nothing of another dialect. `gateway.api.responder` drives it.
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
"""Key of the ASGI scope for the `ErrorShape` of the route; OpenAI's until one is found."""

ROUTE = "paddock.route"
"""Key of the ASGI scope for the route's path, with `{names}` for what differs; absent until one is found."""

Headers = list[tuple[bytes, bytes]]

Handler = Callable[[Principal, Scope, Receive, Send], Awaitable[None]]
"""Answers a route's requests as an ASGI app does, with their caller, who may call the route (`gateway.api.routes`).

Every handler is a function or a method of this form; `gateway.api.call_handlers` makes those of calls in any dialect.
"""


class ErrorShape(Protocol):
    """Writes an error of a dialect where nothing else was sent before. Stateless."""

    def status(self, error: PaddockError) -> int: ...

    def body(self, error: PaddockError, request_log: RequestLog) -> bytes:
        """Return a JSON object."""
        ...


class DialectRequest(Protocol):
    """One request of a dialect, parsed: a frozen value that the dialect's writers get as well."""

    @property
    def model(self) -> str:
        """The name that the caller gave; empty: none."""
        ...

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        """One request per answer: those that `n` and several prompts ask for are generated beside each other."""
        ...

    @property
    def stream(self) -> bool: ...


class StreamWriter(Protocol):
    """Writes one streamed answer as whole server-sent events. A method returns nothing where the client gets nothing.

    `chunks` runs once per token. It never sees `Failed`: that comes as `broken`.
    """

    def opening(self) -> bytes:
        """Return the first events. Called once, when the first answer has begun."""
        ...

    def chunks(self, events: list[CallEvent], choice: int) -> Written:
        """Return these events in the dialect. `choice`: the number of the request that they belong to."""
        ...

    def idle(self) -> bytes:
        """Return events that tell nothing new, also before the opening, for clients that know no comments."""
        ...

    def closing(self) -> Written:
        """Return the last events. Called after the end of every answer."""
        ...

    def broken(self, error: PaddockError) -> Written:
        """Return the last events in place of the rest, for an error after `opening` was asked for."""
        ...


class WholeWriter(Protocol):
    """Collects one answer that is sent whole."""

    def add(self, events: list[CallEvent], choice: int) -> None: ...

    def parts(self) -> Iterator[bytes]:
        """Yield a JSON object in one part or several, when every answer has ended."""
        ...


RequestT = TypeVar("RequestT", bound=DialectRequest)
RequestIn = TypeVar("RequestIn", bound=DialectRequest, contravariant=True)


class Writers(Protocol[RequestIn]):
    """Makes the writers of answers. Stateless."""

    def stream_writer(self, asked: RequestIn, call: Call, request_log: RequestLog) -> StreamWriter: ...

    def whole_writer(self, asked: RequestIn, call: Call, request_log: RequestLog) -> WholeWriter: ...


class Dialect(Writers[RequestT], Protocol[RequestT]):
    """A way to ask for generated text. Stateless."""

    def read(self, raw: bytes, scope: Scope) -> RequestT:
        """Return the parsed request. Raises PaddockError for what is invalid or not supported, naming the parameter."""
        ...
