"""Reads a request's body, within limits of size and time, and decodes its JSON.

`ShapeCheck` limits how many strings, numbers, arrays and objects a body holds. It counts them in the bytes as they come
in, before anything is decoded. A body beyond a limit gets an InvalidRequest.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope

from gateway.api.intake.decoding import let_loop_run
from gateway.api.intake.disconnect import ClientGone
from gateway.errors import BodyTooLarge, BodyTooSlow, ContextOverflow, InvalidRequest
from workers.protocol.framing import read_float

BODY_TIMEOUT_S = 60.0
"""Maximum seconds from the headers to the body's last byte: an endless body would hold its memory for ever."""

BODY_REMEDY = "Send less, or, where it takes prompts, have the operator raise PADDOCK_MAX_BODY_BYTES."

MAX_FIELDS = 1000
"""Maximum fields of the body's outermost object."""

OnPart = Callable[[bytes, int], Awaitable[bytes]]

MAX_TOKEN = 2**31 - 1
LONG_BYTES = 64 << 10
"""Longer bodies (in bytes) are decoded field by field. Longer fields that are arrays of arrays: by item."""

PACKED_BYTES = 256
"""An array of token ids is packed (`packed`) if its JSON has more bytes. Shorter arrays can be `logit_bias` pairs."""

_ARRAYS = re.compile(rb"\s*\[\s*\[")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_tokens = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=MAX_TOKEN)]]).decode
decode_json = msgspec.json.Decoder(float_hook=read_float).decode
"""Decodes every body. Raises msgspec.DecodeError, UnicodeDecodeError, RecursionError."""


def declared_bytes(scope: Scope) -> int:
    """Return the body's Content-Length; 0 if it has none."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    return int(declared) if declared.isdigit() else 0


async def _keep_part(part: bytes, num_bytes: int) -> bytes:
    """Return a part of a body as it is."""
    return part


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    timeout_s: float = BODY_TIMEOUT_S,
    on_part: OnPart = _keep_part,
    remedy: str = BODY_REMEDY,
) -> bytes:
    """Return the whole body. `on_part` is awaited with each part and the number of bytes so far, and returns what is to
    be kept of the part; it may raise. `remedy`: what to do about a body that is too large.

    Raises BodyTooLarge (before reading, if the Content-Length says so; else while reading), BodyTooSlow, ClientGone."""
    if (declared := declared_bytes(scope)) > limit:
        raise too_large(f"{declared} bytes", limit, remedy)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_whole(receive, limit, on_part, remedy)
    except TimeoutError:
        raise BodyTooSlow(
            f"The request body was not complete within {timeout_s:g} s. Send the request again, smaller or over a "
            "faster connection."
        ) from None


async def _read_whole(receive: Receive, limit: int, on_part: OnPart, remedy: str) -> bytes:
    whole = BytesIO()  # filled as it comes: joining the parts of a large body at its end takes long, and memory for two
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > limit:
            raise too_large(f"more than {limit} bytes", limit, remedy)
        part = await on_part(part, num_bytes)
        is_last = not message.get("more_body", False)
        if is_last and not whole.tell():
            return part
        whole.write(part)
        if is_last:
            return whole.getvalue()


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a body that must be a JSON object. Raises InvalidRequest, which says where the JSON is invalid."""
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


def _decode(body: bytes) -> Any:
    """Decode a body: a long one field by field, with token ids packed (`packed`). Raises what `decode_json` raises.

    Decoded in one call, half a million token ids in seventeen prompts held the interpreter for 25 ms. Their 16 MB of
    ints lay among objects that live longer, so that 40 MB of memory never went back to the system."""
    if len(body) <= LONG_BYTES:
        return decode_json(body)
    try:
        return {name: _value(raw) for name, raw in _decode_fields(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode_json(body)  # says where the body is invalid, or returns what it is if no object


def _value(raw: msgspec.Raw) -> Any:
    data = memoryview(raw)
    if len(data) <= LONG_BYTES or _ARRAYS.match(data) is None:
        return decode_json(data)
    values = []
    for item in _decode_items(data):
        values.append(_item(item))
        let_loop_run()
    return values


def _item(raw: msgspec.Raw) -> Any:
    """Decode an item of an array: a long array of token ids as a packed one (`packed`), anything else as plain JSON."""
    if len(memoryview(raw)) > PACKED_BYTES:
        with suppress(msgspec.ValidationError):
            return array("i", _decode_tokens(raw))
    return decode_json(raw)


def packed(items: Sequence[Any]) -> array[int] | None:
    """Return token ids as an array with four bytes each; None if an item is no token id."""
    if isinstance(items, array):
        return items
    if set(map(type, items)) != {int} or min(items) < 0 or max(items) > MAX_TOKEN:
        return None
    return array("i", items)


def too_large(size: str, limit: int, remedy: str = BODY_REMEDY) -> BodyTooLarge:
    return BodyTooLarge(f"The request body has {size}; the limit of this route is {limit}. {remedy}")


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


MAX_STRINGS = 200_000
"""Maximum strings in a body, field names included. Ten thousand messages of one part each have seventy thousand."""
MAX_CONTAINERS = 65_536
"""Maximum arrays and objects together in a body."""
MAX_DEPTH = 128
MIN_ITEMS = 32_768
"""Maximum items of an array, raised to the longest context's tokens if these are more. Beyond it: ContextOverflow."""
MAX_NUMBERS = 524_288
"""Maximum numbers in a body, or the longest context's tokens if these are more. Decoding a million takes 40 ms."""
MAX_EXPONENTS = 1_024
"""Maximum numbers with an exponent: those near the limits of floats take microseconds to parse, 100 times the usual."""
MAX_DIGITS = 100
"""Maximum digits of a number; no useful one has more. Parsing time grows with the square of an integer's digits."""
UNCHECKED_BYTES = 16 << 10
"""Bodies of at most this many bytes are not checked: their strings, numbers and arrays are too few to matter."""
UNCHECKED_FACTOR = 4
"""Bytes of memory counted for each byte of an unchecked body; its arrays, objects, strings and numbers count extra."""
UNCHECKED_ARRAY_BYTES, UNCHECKED_OBJECT_BYTES, UNCHECKED_STRING_BYTES, UNCHECKED_NUMBER_BYTES = 96, 256, 64, 24
"""Bytes counted per array, object, string, number of an unchecked body: 500 waiting calls of 15 KiB `[]` held 70 MB."""
SLICE_BYTES = 32 << 10
"""Bytes checked without a pause: that takes a millisecond or two if all are brackets, 0.1 ms if they are text."""

_STRUCTURE = b"[]{},"
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_TOO_LONG = b"0" * (MAX_DIGITS + 1)
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
_RUNS = re.compile(rb"[\[\]{}]+")
_BRACKET = re.compile(rb"[\[\]{}]")
_NO_NUMBERS = re.compile(rb":|,\s*,")
"""Finds, in what lies between two brackets, without its strings, an item that is a string, or a field of an object."""

_NARROW = bytes(range(0xF0))
_WIDE_ESCAPE = re.compile(rb"\\u[dD][89abAB]")
"""Finds escaped characters beyond U+FFFF (`_NARROW`: unescaped). A string with one takes 4 bytes for each character."""
_ESCAPE_BYTES = 4
STRING_BYTES, CONTAINER_BYTES, NUMBER_BYTES = 64, 512, 16
"""Bytes of memory that a string, an array or object, and a number of a body take, in addition to their characters."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much a checked body holds: its strings, its numbers and the memory it takes."""

    num_strings: int
    """Number of strings, field names included."""
    num_numbers: int
    """Number of numbers, estimated from the commas."""
    held_bytes: int
    """Maximum bytes of memory that the body takes once it is decoded."""


def unchecked_held_bytes(raw: bytes) -> int:
    """Return the bytes of memory that a body takes once it is decoded, if it is too short to be checked."""
    parts = (raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw).split(b'"')
    outside = b"".join(parts[::2])
    num_strings, num_arrays, num_objects = len(parts) // 2, outside.count(b"["), outside.count(b"{")
    num_numbers = max(0, outside.count(b",") - num_strings - num_arrays - num_objects)
    held_bytes = UNCHECKED_FACTOR * len(raw) + UNCHECKED_STRING_BYTES * num_strings
    held_bytes += UNCHECKED_ARRAY_BYTES * num_arrays + UNCHECKED_OBJECT_BYTES * num_objects
    return held_bytes + UNCHECKED_NUMBER_BYTES * num_numbers


def slices(raw: bytes) -> Iterator[bytes]:
    """Yield a body in pieces of at most SLICE_BYTES, each to be checked without a pause."""
    if len(raw) <= SLICE_BYTES:
        yield raw
        return
    for start in range(0, len(raw), SLICE_BYTES):
        yield raw[start : start + SLICE_BYTES]


class ShapeCheck:
    """Counts what a body holds as its bytes come in, and refuses it with the first slice that exceeds a limit.

    Decoding makes an object of each string, array and object: 8 MiB hold 2.8 million of them, which take gigabytes and
    half a minute once they are validated. Strings are removed before commas and brackets are counted: text may have
    any number of those."""

    def __init__(self, max_items: int) -> None:
        """`max_items`: tokens of the longest context of all models."""
        self._max_items = max(MIN_ITEMS, max_items)
        self._max_numbers = max(MAX_NUMBERS, max_items)
        self._num_bytes = 0
        self._bytes_per_character = 1
        self._tail = b""
        """The last bytes so far: a `\\u` escape may go on in the next slice."""
        self._escape = b""
        """A backslash that ended the last slice: the character that it escapes begins the next slice."""
        self._in_string = False
        self._num_quotes = self._num_opened = self._num_closed = self._num_commas = 0
        self._num_in_row = 0
        """Commas since the last bracket."""
        self._num_exponents = 0
        self._digits = b""
        """The last bytes outside of strings, each digit replaced by 0: a number may go on in the next slice."""

    def add(self, piece: bytes) -> None:
        """Check the next bytes of the body, best a piece from `slices`. Raises InvalidRequest, ContextOverflow."""
        self._num_bytes += len(piece)
        self._widen(piece)
        if self._escape or b"\\" in piece:
            piece = self._without_escapes(piece)
        parts = piece.split(b'"')
        self._num_quotes += len(parts) - 1
        if self._num_quotes // 2 > MAX_STRINGS:
            raise _too_many("strings, names of fields included", MAX_STRINGS)
        outside = b"".join(parts[self._in_string :: 2])
        skeleton = outside.translate(None, _OTHERS)
        self._in_string ^= len(parts) % 2 == 0
        self._check_numbers(outside)
        if not skeleton:
            return
        num_opened = skeleton.count(b"[") + skeleton.count(b"{")
        num_closed = skeleton.count(b"]") + skeleton.count(b"}")
        before = self._num_opened - self._num_closed
        self._num_opened += num_opened
        self._num_closed += num_closed
        if self._num_containers > MAX_CONTAINERS:
            raise _too_many("arrays and objects", MAX_CONTAINERS)
        if before + num_opened > MAX_DEPTH:
            _check_depth(skeleton, before)
        self._check_items(skeleton, outside)
        # After each comma comes a string, an array, an object or a number (or `true`, which is as short).
        if self._num_commas - self._num_quotes // 2 - self._num_containers >= self._max_numbers:
            raise _too_many("numbers", self._max_numbers)

    def shape(self) -> Shape:
        """Return how much the whole body holds."""
        num_strings = self._num_quotes // 2
        num_numbers = max(0, self._num_commas - num_strings // 2)
        held_bytes = self._num_bytes * self._bytes_per_character
        held_bytes += num_strings * STRING_BYTES + self._num_containers * CONTAINER_BYTES
        return Shape(num_strings, num_numbers, held_bytes + num_numbers * NUMBER_BYTES)

    @property
    def _num_containers(self) -> int:
        """Return the number of arrays and objects: that of opening or of closing brackets, whichever is larger."""
        return max(self._num_opened, self._num_closed)

    def _widen(self, piece: bytes) -> None:
        """Update how many bytes of memory a character of the body takes: 1, 2 or 4."""
        if self._bytes_per_character == 4:
            return
        if not piece.isascii():
            self._bytes_per_character = 4 if piece.translate(None, _NARROW) else 2
        seam = self._tail + piece[: _ESCAPE_BYTES - 1]
        for text in (seam, piece):
            if b"\\u" in text:
                wide = self._bytes_per_character == 4 or _WIDE_ESCAPE.search(text)
                self._bytes_per_character = 4 if wide else 2
        self._tail = seam[1 - _ESCAPE_BYTES :] if len(piece) < _ESCAPE_BYTES else piece[1 - _ESCAPE_BYTES :]

    def _without_escapes(self, piece: bytes) -> bytes:
        """Remove escaped quotes and backslashes, which end no string; keep a last backslash for the next slice."""
        piece = self._escape + piece
        num_last = len(piece) - len(piece.rstrip(b"\\"))
        self._escape = b"\\" if num_last % 2 else b""
        if self._escape:
            piece = piece[:-1]
        return piece.replace(b"\\\\", b"").replace(b'\\"', b"")

    def _check_numbers(self, outside: bytes) -> None:
        """Limit numbers' digits and the number of exponents (`e` after a digit). `outside`: a slice without strings."""
        if not outside:
            return
        digits = self._digits + outside.translate(_DIGITS)
        if _TOO_LONG in digits:
            raise InvalidRequest(f"The body has a number of more than {MAX_DIGITS} digits. Send a shorter one.")
        self._num_exponents += digits.count(b"0e") - self._digits.count(b"0e")
        if self._num_exponents > MAX_EXPONENTS:
            raise _too_many("numbers with an exponent", MAX_EXPONENTS)
        self._digits = digits[-MAX_DIGITS:]

    def _check_items(self, skeleton: bytes, outside: bytes) -> None:
        """Limit an array's items, counted as commas with no bracket between: such long arrays have only token ids,
        or strings, and an object has as many fields. `outside`: the slice without strings, `skeleton`: its structure.
        """
        num_commas = skeleton.count(b",")
        self._num_commas += num_commas
        if self._num_in_row + num_commas < self._max_items:
            num_last = len(skeleton) - len(skeleton.rstrip(b","))
            self._num_in_row = num_last + (self._num_in_row if num_last == len(skeleton) else 0)
            return
        runs = [len(run) for run in _RUNS.split(skeleton)]
        runs[0] += self._num_in_row
        self._num_in_row = runs[-1]
        if (longest := max(runs) + 1) > self._max_items:
            first, *later = _BRACKET.split(outside)
            row = first if runs[0] == longest - 1 else max(later, key=lambda one: one.count(b","))
            if _NO_NUMBERS.search(row):
                raise _too_many("items in one array, or fields in one object", self._max_items)
            message = (
                f"the body has an array of {longest} items or more, and none may be longer than the longest context "
                "here; send less"
            )
            raise ContextOverflow(message, num_prompt_tokens=longest, n_ctx=self._max_items)


def _check_depth(skeleton: bytes, before: int) -> None:
    """Raise InvalidRequest if a slice is nested too deeply. `before`: levels that are open at its beginning."""
    steps = array("b", skeleton.translate(None, b",").translate(_STEPS))
    if max(accumulate(steps, initial=before)) > MAX_DEPTH:
        raise InvalidRequest(
            f"The body is nested too deeply: more than {MAX_DEPTH} levels. Send a flatter JSON object."
        )


def _too_many(what: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"The body has more than {limit} {what}. Send several requests.")
