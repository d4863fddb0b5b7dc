"""Reads a request's body, never larger than the limit and never slower than the bound, and decodes its JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from gateway.api.intake.decoding import let_loop_run
from gateway.api.intake.presence import ClientGone
from gateway.errors import BodyTooLarge, BodyTooSlow, InvalidRequest
from workers.protocol.json_parts import read_float

BODY_TIMEOUT_S = 60.0
"""Seconds from the headers to the body's last byte: an endless sender would hold its connection and memory for ever."""

MAX_FIELDS = 1000
"""Most fields of the body's own object."""

Came = Callable[[bytes, int], Awaitable[None]]


class Numbers(list[int]):
    """Integers of an array of arrays, each value one object: a million tokens take 8 MB so, and 40 MB otherwise."""


LONG_BYTES = 64 << 10
"""Bytes from which on a body is decoded in parts, and an array of arrays of it an array at a time."""

_ARRAYS = re.compile(rb"\s*\[\s*\[")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_json = msgspec.json.Decoder(float_hook=read_float).decode
"""Decodes every body. Raises msgspec.DecodeError, UnicodeDecodeError, RecursionError."""


def declared_bytes(scope: Scope) -> int:
    """Return the body's Content-Length; 0 where there is none."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    return int(declared) if declared.isdigit() else 0


async def _nobody(part: bytes, num_bytes: int) -> None:
    """Ignore a part of a body."""


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    timeout_s: float = BODY_TIMEOUT_S,
    came: Came = _nobody,
) -> bytes:
    """Return the whole body. `came` gets each part and the number of bytes so far; it may raise, and take its time.

    Raises BodyTooLarge (by its Content-Length before reading, else while counting), BodyTooSlow and ClientGone.
    """
    if (declared := declared_bytes(scope)) > limit:
        raise _too_large(f"{declared} bytes", limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_whole(receive, limit, came)
    except TimeoutError:
        raise BodyTooSlow(
            f"The request body was not complete within {timeout_s:g} s. Send the request again, smaller or over a "
            "faster connection."
        ) from None


async def _read_whole(receive: Receive, limit: int, came: Came) -> bytes:
    whole = BytesIO()  # filled as it comes: joining the parts of a large body at its end takes long, and memory for two
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        await came(part, num_bytes)
        is_last = not message.get("more_body", False)
        if is_last and len(part) == num_bytes:
            return part
        whole.write(part)
        if is_last:
            return whole.getvalue()


def read_object(body: bytes) -> dict[str, Any]:
    """Return the body as a JSON object. Raises InvalidRequest that says where it breaks."""
    if not body.strip():
        raise InvalidRequest("The request has no body. Send a JSON object.")
    try:
        document = _decoded(body)
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


def _decoded(body: bytes) -> Any:
    """Decode a body. Raises as `decode_json`.

    Half a million token ids in seventeen prompts held the interpreter for 25 ms in one call, and the 16 MB of their
    objects lay beside others' that live on, so that 40 MB never went back to the system.
    """
    if len(body) <= LONG_BYTES:
        return decode_json(body)
    try:
        return {name: _value(raw) for name, raw in _decode_fields(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode_json(body)  # it says where the body breaks, or what it is


def _value(raw: msgspec.Raw) -> Any:
    data = memoryview(raw)
    if len(data) <= LONG_BYTES or _ARRAYS.match(data) is None:
        return decode_json(data)
    values = []
    for item in _decode_items(data):
        values.append(_shared(decode_json(item)))
        let_loop_run()
    return values


def _shared(value: Any) -> Any:
    """Return an array of integers as `Numbers`, anything else as it is."""
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return value
    known: dict[int, int] = {}
    return Numbers(map(known.setdefault, value, value))


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
