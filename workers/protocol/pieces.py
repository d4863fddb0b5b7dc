"""Takes what is long in pieces, between which other threads can run: decodes messages, collects and lists tokens.

A message of 32 MiB that is decoded in one call holds the interpreter's lock for 0.2 s. Only to look for the end of a
field takes 50 ms of that, so nothing is looked for here: `workers.protocol.framing.marked_parts` marks where each long
value begins and ends, and where a long list may be cut.

A text of megabytes has millions of tokens. In one call that makes an array or a list of them no other thread of a
worker runs: 30 ms for each million, 2 ms where the memory of an array is copied. So a run is taken at a time.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.inspect import is_struct_type

from workers.protocol.framing import BASE64_CHARS, CLOSES, CUT, OPENS, read_float

PIECE_BYTES = 256 << 10
"""Maximum bytes of JSON that are decoded in one call, which takes two milliseconds at most, unless they are items of a
list that fit in one part of their writer's: 128 Ki characters, each of up to six bytes."""
_ESCAPE_BYTES = 6
"""Bytes of the longest escape, `\\u4f60`; two of them can be the halves of one character."""
_SEVERAL_BYTES, _FIRST_OF_SEVERAL = 0x80, 0xC0
"""Lowest byte of a character that has several in UTF-8, and the lowest with which such a character begins."""

INT32 = "i"
"""Type code of the arrays: the numbers that llama.cpp's tokens are."""

UINT32 = "I"

RUN_TOKENS = 1 << 15
"""Maximum number of tokens to convert in one call, which takes a millisecond."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class PieceDecoder(Generic[StructT]):
    """Decodes a message of one type; a long one in pieces, if its writer has marked them."""

    def __init__(self, kind: type[StructT]) -> None:
        self._kind = kind
        self._decode: Callable[[bytes], StructT] = msgspec.json.Decoder(kind, float_hook=read_float).decode

    def __call__(self, data: bytes) -> StructT:
        """Return the message. Raises msgspec.DecodeError, UnicodeDecodeError."""
        if len(data) > PIECE_BYTES and data.startswith(OPENS):
            with contextlib.suppress(_Indivisible, msgspec.DecodeError, UnicodeDecodeError):
                return _struct_of(data, _marked_in(data), self._kind)
        return self._decode(data)


class _Indivisible(Exception):
    """A message is not marked as `marked_parts` does it."""


class _Long(NamedTuple):
    """A long value, without the marks around it, by its place in the message."""

    start: int
    end: int
    inner: list[_Long]
    """The long values in it, in order, each with its own."""
    cuts: list[int]
    """The places of the marks between the runs of items in it, if it is a list."""


def _marked_in(data: bytes) -> _Long:
    """Return the one long value that a message is, from all of its marks. Raises _Indivisible."""
    marks = sorted(place for mark in (OPENS, CLOSES, CUT) for place in _places(data, mark))
    begun = [_Long(0, 0, [], [])]
    for at, mark in marks:
        if mark == CUT:
            begun[-1].cuts.append(at)
        elif mark == OPENS:
            begun.append(_Long(at + 1, 0, [], []))
        else:
            ended = begun.pop()._replace(end=at)
            if not begun:
                raise _Indivisible
            begun[-1].inner.append(ended)
    if len(begun) != 1 or len(begun[0].inner) != 1 or begun[0].inner[0].end != len(data) - 1:
        raise _Indivisible
    return begun[0].inner[0]


def _places(data: bytes, mark: bytes) -> Iterator[tuple[int, bytes]]:
    for start in range(0, len(data), PIECE_BYTES):
        at = data.find(mark, start, start + PIECE_BYTES)
        while at >= 0:
            yield at, mark
            at = data.find(mark, at + 1, start + PIECE_BYTES)


class _Form(NamedTuple):
    """How a value of one type is decoded."""

    decode: Callable[[bytes], Any]
    struct: type[msgspec.Struct] | None
    """The struct that the value can be."""
    make: Callable[[list[Any]], Sequence[Any]] | None
    """Makes the list that the value can be from its items; None: it can't be a list of any length."""
    items: Any
    """The type of the items."""
    decode_items: Callable[[bytes], list[Any]]
    """Decodes some of the items, as a list."""
    is_binary: bool
    """Whether the value can be bytes, which JSON has as base64."""


@cache
def _form_of(kind: Any) -> _Form:
    kinds = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    many = next((one for one in kinds if _is_list(one)), None)
    items: Any = Any if many is None else get_args(many)[0]
    list_of_items: Any = list[items]
    return _Form(
        msgspec.json.Decoder(kind, float_hook=read_float).decode,
        next((one for one in kinds if is_struct_type(one)), None),
        None if many is None else tuple if get_origin(many) is tuple else list,
        items,
        msgspec.json.Decoder(list_of_items, float_hook=read_float).decode,
        bytes in kinds,
    )


def _is_list(kind: Any) -> bool:
    origin = get_origin(kind)
    return origin in (list, Sequence) or (origin is tuple and get_args(kind)[1:] == (Ellipsis,))


@cache
def _fields_of(kind: type[msgspec.Struct]) -> Mapping[str, msgspec.structs.FieldInfo]:
    return {one.encode_name: one for one in msgspec.structs.fields(kind)}


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_binary = msgspec.json.Decoder(bytes).decode


def _value_of(data: bytes, place: _Long, form: _Form) -> Any:
    begins = data[place.start : place.start + 1]
    if place.end - place.start > PIECE_BYTES:
        if begins == b'"' and form.is_binary:
            return b"".join(_binary_of(data, place))
        if begins == b'"':
            form.decode(b'""')  # raises where it may not be a text
            return "".join(_texts_of(data, place))
        if begins == b"{" and form.struct is not None:
            return _struct_of(data, place, form.struct)
        if begins == b"[" and form.make is not None:
            items = list[Any]()
            for run in _runs_of(data, place, form):
                items += run
            return items if form.make is list else form.make(items)
    return form.decode(data[place.start : place.end])


def _struct_of(data: bytes, place: _Long, kind: type[StructT]) -> StructT:
    """Return a struct from its JSON. Raises _Indivisible, msgspec.DecodeError."""
    outline, long = _outline_of(data, place)
    fields, values = _fields_of(kind), {}
    for name, raw in _decode_fields(outline).items():
        value = bytes(raw)
        inner = long.pop(value, None)
        if (field := fields.get(name)) is None:
            continue
        form = _form_of(field.type)
        values[field.name] = form.decode(value) if inner is None else _value_of(data, inner, form)
    if long or any(field.required and field.name not in values for field in fields.values()):
        raise _Indivisible
    return kind(**values)


def _outline_of(data: bytes, place: _Long) -> tuple[bytes, dict[bytes, _Long]]:
    """Return a value's JSON with something else in place of each long one in it, and the long one by that.

    What stands there are numbered lists with a blank, which no JSON has that msgspec writes."""
    parts, long, start = list[bytes](), dict[bytes, _Long](), place.start
    for number, one in enumerate(place.inner):
        stands = b"[ %d]" % number
        parts += (data[start : one.start - len(OPENS)], stands)
        long[stands] = one
        start = one.end + len(CLOSES)
    return b"".join((*parts, data[start : place.end])), long


def _runs_of(data: bytes, place: _Long, form: _Form) -> Iterator[list[Any]]:
    """Yield a list's items, as many at a time as its writer wrote in one part. Raises _Indivisible."""
    long = {one.start - len(OPENS): one for one in place.inner}
    item = _form_of(form.items)
    start = place.start + 1
    for cut in (*place.cuts, place.end):
        end = cut - 1  # a comma is before each mark, and the bracket at the end
        if (one := long.pop(start, None)) is None:
            yield form.decode_items(b"[%b]" % data[start:end])
        elif one.end + len(CLOSES) == end:
            yield [_value_of(data, one, item)]
        else:
            raise _Indivisible
        if data[end:cut] != (b"]" if cut == place.end else b","):
            raise _Indivisible
        start = cut + len(CUT)
    if long:
        raise _Indivisible


def _texts_of(data: bytes, place: _Long) -> Iterator[str]:
    """Yield a long text in pieces that end between two characters, escaped ones too."""
    start, end = place.start + 1, place.end - 1
    while start < end:
        piece = data[start : min(end, start + PIECE_BYTES)]
        if start + len(piece) < end:
            piece = piece[: _last_cut(piece)]
        yield _decode_text(b'"%b"' % piece)
        start += len(piece)


def _binary_of(data: bytes, place: _Long) -> Iterator[bytes]:
    """Yield long bytes in pieces of whole groups of base64."""
    step = PIECE_BYTES - PIECE_BYTES % BASE64_CHARS
    for start in range(place.start + 1, place.end - 1, step):
        yield _decode_binary(b'"%b"' % data[start : min(place.end - 1, start + step)])


def _last_cut(piece: bytes) -> int:
    """Return where to cut a piece that begins with a whole character, so that it ends with one: before an escape that
    is among its last bytes, or before a character of several bytes."""
    masked = piece.replace(b"\\\\", b"..")
    if (at := masked.rfind(b"\\", len(piece) - _ESCAPE_BYTES)) >= 0:
        before = masked[at - _ESCAPE_BYTES : at].lower()
        return at - _ESCAPE_BYTES if before.startswith((b"\\ud8", b"\\ud9", b"\\uda", b"\\udb")) else at
    if piece[-1] < _SEVERAL_BYTES:
        return len(piece)
    return len(piece) - next(back for back in range(1, len(piece)) if piece[-back] >= _FIRST_OF_SEVERAL)


def in_array(tokens: Sequence[int]) -> array[int]:
    """Return the tokens in an array of 32-bit numbers: the same one, if that is what they are. Raises OverflowError."""
    if isinstance(tokens, array) and tokens.typecode in (INT32, UINT32):
        return tokens
    return joined(tokens)


def joined(*parts: Sequence[int]) -> array[int]:
    """Return the tokens of all parts, one after the other, in a new array. Raises OverflowError."""
    whole = array(INT32)
    for part in parts:
        extend(whole, part)
    return whole


def extend(tokens: array[int], more: Sequence[int]) -> None:
    """Add further tokens to an array. Raises OverflowError for a number that has more than 32 bits."""
    is_same = isinstance(more, array) and more.typecode == tokens.typecode
    for start in range(0, len(more), RUN_TOKENS):
        run = more[start : start + RUN_TOKENS]
        tokens.extend(run if is_same else iter(run))  # `extend` refuses an array of another kind


def to_bytes(tokens: array[int]) -> bytes:
    """Return the memory of an array. Parts of a long one are copied, and while these are joined other threads run."""
    if len(tokens) <= RUN_TOKENS:
        return tokens.tobytes()
    return b"".join([tokens[start : start + RUN_TOKENS].tobytes() for start in range(0, len(tokens), RUN_TOKENS)])


def in_list(tokens: Sequence[int]) -> list[int]:
    """Return the tokens in a list: the same one, if that is what they are."""
    if isinstance(tokens, list):
        return tokens
    listed: list[int] = []
    for start in range(0, len(tokens), RUN_TOKENS):
        listed.extend(tokens[start : start + RUN_TOKENS])
    return listed
