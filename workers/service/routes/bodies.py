"""Reads bodies of the worker protocol within a bound, decodes or refuses them, and writes answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from workers.http_server.state import Refusal
from workers.protocol.events import HTTP_STATUS, CallFailed, Failure, FailureCode

Message = TypeVar("Message")
Result = TypeVar("Result")

MAX_REFUSED_BYTES = 64 << 20
"""Maximum bytes of a body that is read although its request is refused, so that the connection can be used again."""

INLINE_BYTES = 256 << 10
INLINE_COMMAS = 8_000
"""A body of at most `INLINE_BYTES` with at most `INLINE_COMMAS` commas (about one per number or name) is decoded on the
event loop, in a millisecond or two; others on a thread."""

encode = msgspec.json.Encoder().encode


class PeerGone(Exception):
    """Raised if the peer has closed the connection, so that nobody reads an answer."""


async def while_peer_stays(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """Return the result of `work` or raise its error. If the peer goes away, cancel it and raise PeerGone.

    Read the request's body first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_cancel_when_gone(receive, task))
    try:
        await asyncio.wait([task])
    finally:
        watcher.cancel()
        task.cancel()
    try:
        if task.cancelled():
            raise PeerGone
        return task.result()
    finally:
        del task, watcher  # an error refers to this frame, and the task to the error: a cycle that stays in memory


async def _cancel_when_gone(receive: Receive, work: asyncio.Task[Result]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body. Raises CallFailed if it is longer than `max_bytes`, or if it ends early."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                message = f"the request body is longer than {max_bytes} bytes; send a shorter one"
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message))
            parts.append(part)
    except ClientDisconnect:
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, "the body ended early; send it again")) from None
    # Joining 43 MiB takes 25 ms. The interpreter's lock is let go of meanwhile, so a thread holds up nobody.
    return b"".join(parts) if size <= INLINE_BYTES else await asyncio.to_thread(b"".join, parts)


def decoded(decode: Callable[[bytes], Message], body: bytes) -> Message:
    """Return the decoded body. Raises CallFailed for a body that `decode` does not take."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body does not follow the worker protocol: {error}"
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message)) from None


async def received(request: Request, max_bytes: int, decode: Callable[[bytes], Message]) -> Message:
    """Return the message in a request's body; long ones are decoded on a thread. Raises CallFailed."""
    body = await read_body(request, max_bytes)
    if len(body) <= INLINE_BYTES and body.count(b",") <= INLINE_COMMAS:
        return decoded(decode, body)
    return await asyncio.to_thread(decoded, decode, body)


def answer(message: Any, status: int = 200) -> Response:
    return Response(encode(message), status, media_type="application/json")


def answer_of_parts(parts: Iterator[bytes]) -> Response:
    """Return an answer whose parts are made and written one by one, one per iteration of the event loop."""
    first = next(parts)
    if (second := next(parts, None)) is None:
        return Response(first, media_type="application/json")
    return StreamingResponse(_in_turns(chain((first, second), parts)), media_type="application/json")


async def _in_turns(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)


def refusal(failure: Failure) -> Response:
    return answer(failure, HTTP_STATUS[failure.code])


def refusal_body(refused: Refusal) -> bytes:
    """Return the body, a `Failure`, of an error that the HTTP server answers without calling the application.

    Every such error is about a connection or the head of a request, which a gateway makes, so it is never the fault of
    the gateway's caller, and not for the caller to wait for: another worker may have room."""
    message = f"the worker's HTTP server did not take the request: {refused.message}"
    return encode(Failure(FailureCode.UNAVAILABLE, message))


def refusing(path: str, failure: Failure, *methods: str) -> Route:
    """Return a route for work that only another kind of worker does: it answers every request with `failure`."""

    async def refuse(request: Request) -> Response:
        try:
            await received(request, MAX_REFUSED_BYTES, bytes)
        except CallFailed as failed:
            return refusal(failed.failure)
        return refusal(failure)

    return Route(path, refuse, methods=list(methods or ("POST",)))
