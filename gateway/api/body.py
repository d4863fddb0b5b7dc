"""A request's body, never larger than the limit and never slower than the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from gateway.api.presence import ClientGone
from gateway.errors import BodyTooLarge, BodyTooSlow, InvalidRequest

BODY_TIMEOUT_S = 60.0
"""From the headers to the body's last byte: a sender that never ends would hold its connection and memory for ever."""

MAX_FIELDS = 1000
"""Of the body's own object."""

_decode = msgspec.json.Decoder().decode


def declared_bytes(scope: Scope) -> int:
    """Return the body's Content-Length; 0 where there is none."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    return int(declared) if declared.isdigit() else 0


def _grows(num_bytes: int) -> None:
    """Nobody counts."""


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    timeout_s: float = BODY_TIMEOUT_S,
    grown: Callable[[int], None] = _grows,
) -> bytes:
    """Read it whole; `grown` is told how many bytes there are so far, and may raise.

    Raises BodyTooLarge (by its Content-Length before reading, else while counting), BodyTooSlow and ClientGone.
    """
    if (declared := declared_bytes(scope)) > limit:
        raise _too_large(f"{declared} bytes", limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_whole(receive, limit, grown)
    except TimeoutError:
        raise BodyTooSlow(
            f"The request body was not complete within {timeout_s:g} s. Send the request again, smaller or over a "
            "faster connection."
        ) from None


async def _read_whole(receive: Receive, limit: int, grown: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        grown(num_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def read_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest that says where it breaks."""
    if not body.strip():
        raise InvalidRequest("The request has no body. Send a JSON object.")
    try:
        document = _decode(body)
    except UnicodeDecodeError:
        raise InvalidRequest(_not_utf8(body)) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply. Send a flatter JSON object.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {_where(str(error), body)}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {_kind(document)}.")
    if len(document) > MAX_FIELDS:
        raise InvalidRequest(f"The body has {len(document)} fields. Send at most {MAX_FIELDS}.")
    return document


def _too_large(size: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body has {size}; the limit of this route is {limit}. Send less, or, where it takes prompts, have "
        "the operator raise PADDOCK_MAX_BODY_BYTES."
    )


def _not_utf8(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"The body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}. Encode the JSON as UTF-8."
    return "The body holds a string that is not valid Unicode. Encode the JSON as UTF-8."


def _where(problem: str, body: bytes) -> str:
    if "truncated" in problem:
        return f"it ends too early, at byte {len(body)}, or holds half of a surrogate pair."
    return problem.removeprefix("JSON is malformed: ") + "."


def _kind(document: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(document), "a number")
