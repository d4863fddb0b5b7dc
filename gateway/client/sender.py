"""Makes methods of both clients from the functions that build calls: same keywords, types and documentation.

`send` of a client for tasks returns an awaitable, that of a client for threads returns the answer; nothing here depends
on which.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from gateway.client.ask import Ask

P = ParamSpec("P")
T = TypeVar("T")

Send = Callable[[Ask[Any]], Any]


class Sender:
    """The base of objects that have calls as methods. These raise ClientError."""

    def __init__(self, send: Send) -> None:
        self._send = send


def sent(build: Callable[P, Ask[T]]) -> Callable[Concatenate[Sender, P], T]:
    """Return a method that returns the call's answer."""
    return _method(build)


def sent_async(build: Callable[P, Ask[T]]) -> Callable[Concatenate[Sender, P], Awaitable[T]]:
    """Return a method whose result, awaited, is the call's answer."""
    return _method(build)


def _method(build: Callable[P, Ask[Any]]) -> Callable[Concatenate[Sender, P], Any]:
    def method(self: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._send(build(*args, **kwargs))

    method.__name__ = build.__name__
    method.__doc__ = build.__doc__
    signature = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = str(signature.return_annotation).removeprefix("Ask[").removesuffix("]")
    shown = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=answer)
    # `help` shows it; type checkers do not know this attribute of functions.
    setattr(method, "__signature__", shown)  # noqa: B010
    return method
