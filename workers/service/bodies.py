"""Bodies of the worker protocol: read within a bound, decoded or refused, written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from workers.protocol.failures import HTTP_STATUS, CallFailed, Failure, FailureCode

Message = TypeVar("Message")

encode = msgspec.json.Encoder().encode


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises CallFailed past the bound, or when the peer goes away in the middle."""
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
    return b"".join(parts)


def decoded(decode: Callable[[bytes], Message], body: bytes) -> Message:
    """Raises CallFailed for a body that is not this message."""
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"the body does not follow the worker protocol: {error}"
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message)) from None


def answer(message: Any, status: int = 200) -> Response:
    return Response(encode(message), status, media_type="application/json")


def refusal(failure: Failure) -> Response:
    return answer(failure, HTTP_STATUS[failure.code])
