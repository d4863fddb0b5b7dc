"""Reads a form (multipart/form-data) as it comes in: its fields become a JSON object, its file is cut out beside it.

What is made of a form is what `MediaSieve` makes of a JSON body, a text with a short name in place of the file, so that
all that follows is the same for both. Nothing of a part is believed but the name of its field: neither the name of a
file nor its content type. Everything is bounded, and whatever two readers could understand differently is refused.

Sources: RFC 7578 (forms), RFC 2046, section 5.1 (parts and boundaries). Clients write arrays as `name[]` and objects as
`name[key]`.
"""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from io import BytesIO
from typing import Any

import msgspec
from starlette.types import Scope

from gateway.api.media.sieve import Cut
from gateway.errors import BodyTooLarge, InvalidRequest
from workers.protocol.framing import BASE64_GROUP

FORM = b"multipart/form-data"
FILE = "file"
"""The one field that is a file. All others are texts, whatever their parts say."""

MAX_PARTS = 64
MAX_TEXT_BYTES = 64 << 10
"""Maximum bytes of a field that is a text."""
MAX_TEXTS_BYTES = 256 << 10
"""Maximum bytes of all such fields together."""
MAX_HEADER_BYTES = 4 << 10
"""Maximum bytes of the headers of a part."""
MAX_HEADERS = 8
"""Maximum headers of a part."""
MAX_PREAMBLE_BYTES = 1 << 10
"""Maximum bytes before the first part."""
MAX_PADDING_BYTES = 64
"""Maximum blanks behind a boundary."""

_LINE = b"\r\n"
_BLANKS = b" \t"
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER = re.compile(
    rb"[ \t]*;[ \t]*(?:([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64})=(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;\",\\]*))[ \t]*)?"
)
"""One parameter, or none: a semicolon may stand at the end, or two of them together (RFC 9110, 5.6.6)."""
_NAME = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[([A-Za-z0-9_.-]{0,64})\])?")
_PLAIN_ENCODINGS = (b"7bit", b"8bit", b"binary")

Add = Callable[[bytes], None]


def boundary_of(scope: Scope) -> bytes:
    """Return the boundary between the parts of a request's form. Raises InvalidRequest if its body is no form."""
    given = [value for name, value in scope["headers"] if name == b"content-type"]
    kind, parameters = _header_value(given[0]) if len(given) == 1 else (b"", {})
    if kind != FORM:
        raise InvalidRequest(
            "This route takes a form: send the file and the parameters as `multipart/form-data`, once in the header "
            "`content-type`.",
            param="content-type",
        )
    boundary = (parameters or {}).get(b"boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        message = (
            "The header `content-type` names no `boundary` of 1 to 70 characters. Have a library for HTTP write it."
        )
        raise InvalidRequest(message, param="content-type")
    return boundary


class FormReader:
    """Reads one form, which is fed to it in slices. A slice of 32 KiB takes 0.3 ms at most."""

    def __init__(self, boundary: bytes, max_file_bytes: int) -> None:
        self.cuts: dict[str, Cut] = {}
        """Token -> the file for which it stands in the text; at most one."""
        self._delimiter = _LINE + b"--" + boundary
        self._max_file_bytes = max_file_bytes
        self._held = _LINE
        """Bytes that are read again with the next slice. The first boundary may stand without a line end before it."""
        self._read: Callable[[bytes, int], int] = self._preamble
        self._num_before = self._num_parts = self._num_text_bytes = self._num_to_skip = 0
        self._part: _Text | _File = _Text("", "")
        self._fields: dict[str, Any] = {}
        self._has_ended = False

    @property
    def num_bytes(self) -> int:
        """The bytes of all fields so far, the file included."""
        file = self._part.num_bytes if isinstance(self._part, _File) else 0
        return self._num_text_bytes + file + sum(len(cut.data) for cut in self.cuts.values())

    def feed(self, piece: bytes) -> None:
        """Take the next slice. Raises InvalidRequest, BodyTooLarge."""
        if self._has_ended:
            return
        data, self._held = self._held + piece, b""
        at = 0
        while at < len(data) and not self._held and not self._has_ended:
            at = self._read(data, at)

    def finish(self) -> bytes:
        """Return the fields as a JSON object. Raises InvalidRequest if the form is cut."""
        if not self._has_ended:
            raise InvalidRequest("The form ends before its last boundary. Send the whole form.")
        return msgspec.json.encode(self._fields)

    # Each reader below takes what it can of `data` from `at` on, and returns where the next one goes on. What it keeps
    # for the next slice it puts into `_held`.

    def _preamble(self, data: bytes, at: int) -> int:
        found = data.find(self._delimiter, at)
        end = found if found >= 0 else max(at, len(data) - len(self._delimiter) + 1)
        self._num_before += end - at
        if self._num_before > MAX_PREAMBLE_BYTES:
            raise _malformed(f"has more than {MAX_PREAMBLE_BYTES} bytes before its first boundary")
        if found < 0:
            self._held = data[end:]
            return len(data)
        self._read = self._behind_boundary
        return found + len(self._delimiter)

    def _behind_boundary(self, data: bytes, at: int) -> int:
        if data.startswith(b"--", at):
            self._has_ended = True  # what follows means nothing (RFC 2046)
            return len(data)
        padded = data[at : at + MAX_PADDING_BYTES + len(_LINE)]
        rest = padded.lstrip(_BLANKS)
        if rest.startswith(_LINE):
            self._num_parts += 1
            if self._num_parts > MAX_PARTS:
                raise InvalidRequest(f"The form has more than {MAX_PARTS} parts. Send each parameter once.")
            self._read = self._headers
            return at + len(padded) - len(rest) + len(_LINE)
        is_short = len(padded) < MAX_PADDING_BYTES + len(_LINE) and rest in (b"", b"\r", b"-")
        if not is_short:
            raise _malformed("has a boundary with something behind it")
        self._held = data[at:]
        return len(data)

    def _headers(self, data: bytes, at: int) -> int:
        end = data.find(_LINE + _LINE, at)
        if (end if end >= 0 else len(data)) - at > MAX_HEADER_BYTES:
            raise _malformed(f"has a part with more than {MAX_HEADER_BYTES} bytes of headers")
        if end < 0:
            self._held = data[at:]
            return len(data)
        self._begin(_field_of(data[at:end]))
        self._read = self._data
        # The second line end is left: if the part is empty, it is the one that belongs to the next boundary.
        self._num_to_skip = len(_LINE)
        return end + len(_LINE)

    def _data(self, data: bytes, at: int) -> int:
        found = data.find(self._delimiter, at)
        end = found if found >= 0 else max(at, len(data) - len(self._delimiter) + 1)
        self._add(data[at:end])
        if found < 0:
            self._held = data[end:]
            return len(data)
        self._end()
        self._read = self._behind_boundary
        return found + len(self._delimiter)

    def _begin(self, field: str) -> None:
        named = _NAME.fullmatch(field)
        if named is None:
            raise InvalidRequest("The form has a part whose name is no parameter's. Leave it out.")
        name, key = named[1], named[2]
        known = self._fields.get(name)
        is_other_kind = name in self._fields and not isinstance(known, _container(key))
        if is_other_kind or (key is None and name in self._fields) or (isinstance(known, dict) and key in known):
            raise InvalidRequest(f"The form has `{name}` more than once. Send it once.", param=name)
        if key is None and name == FILE:
            self._part = _File(self._max_file_bytes)
            self._fields[name] = None
            return
        self._part = _Text(name, key)
        if key is None:
            self._fields[name] = ""
        else:
            self._fields.setdefault(name, _container(key)())

    def _add(self, data: bytes) -> None:
        num_skipped = min(self._num_to_skip, len(data))
        self._num_to_skip -= num_skipped
        self._num_text_bytes += self._part.add(data[num_skipped:])
        if self._num_text_bytes > MAX_TEXTS_BYTES:
            message = f"The form's parameters have more than {MAX_TEXTS_BYTES} bytes together. Send shorter ones."
            raise BodyTooLarge(message)

    def _end(self) -> None:
        part = self._part
        if isinstance(part, _File):
            token, self.cuts = part.cut()
            self._fields[FILE] = token
        else:
            part.put(self._fields)
        self._part = _Text("", "")


class _Text:
    """A field that is a text, as it comes in."""

    def __init__(self, name: str, key: str | None) -> None:
        """`key`: None: the field is the text; empty: an item of an array; else the name of an object's field."""
        self._name, self._key = name, key
        self._data = bytearray()

    def add(self, data: bytes) -> int:
        """Add bytes; return how many. Raises BodyTooLarge."""
        self._data += data
        if len(self._data) > MAX_TEXT_BYTES:
            message = f"`{self._name}` has more than {MAX_TEXT_BYTES} bytes. Send a shorter text; a file is `{FILE}`."
            raise BodyTooLarge(message, param=self._name)
        return len(data)

    def put(self, fields: dict[str, Any]) -> None:
        """Put the text into its place among the fields. Raises InvalidRequest if it is no UTF-8."""
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            message = f"`{self._name}` is no text in UTF-8. Encode it as UTF-8."
            raise InvalidRequest(message, param=self._name) from None
        if self._key is None:
            fields[self._name] = text
        elif self._key:
            fields[self._name][self._key] = text
        else:
            fields[self._name].append(text)


class _File:
    """The file, as it comes in."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._whole = BytesIO()
        self._digest = sha256()

    @property
    def num_bytes(self) -> int:
        return self._whole.tell()

    def add(self, data: bytes) -> int:
        """Add bytes; return 0, as they are no text. Raises BodyTooLarge."""
        if self.num_bytes + len(data) > self._max_bytes:
            raise BodyTooLarge(
                f"`{FILE}` has more than {self._max_bytes} bytes, the limit of a picture or sound. Send a shorter "
                "or compressed one, or have the operator raise PADDOCK_MAX_MEDIA_MIB.",
                param=FILE,
            )
        self._whole.write(data)
        self._digest.update(data)
        return 0

    def cut(self) -> tuple[str, dict[str, Cut]]:
        """Return the token that stands for the file, which no caller can know, and the file by its token."""
        data = self._whole.getvalue()
        token = f"@{secrets.token_hex(8)}.0@"
        last = b64encode(data[-(len(data) % BASE64_GROUP or BASE64_GROUP) :])
        return token, {token: Cut(data, self._digest.digest(), last)}


def _container(key: str | None) -> type[list[Any]] | type[dict[str, Any]]:
    """Return the type of what holds a field `name[key]`."""
    return dict if key else list


def _field_of(headers: bytes) -> str:
    """Return the name of a part's field. `headers`: the part's header lines. Raises InvalidRequest."""
    lines = headers.split(_LINE)
    if len(lines) > MAX_HEADERS:
        raise _malformed(f"has a part with more than {MAX_HEADERS} headers")
    values: dict[bytes, bytes] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None or found[1].lower() in values:
            raise _malformed("has a part with a header that is none, or comes twice")
        values[found[1].lower()] = found[2].strip(_BLANKS)
    if values.get(b"content-transfer-encoding", b"binary").lower() not in _PLAIN_ENCODINGS:
        raise _malformed("has a part in a `content-transfer-encoding`; parts of forms have none")
    kind, parameters = _header_value(values.get(b"content-disposition", b""))
    name = (parameters or {}).get(b"name")
    if kind != b"form-data" or name is None:
        raise _malformed("has a part without `content-disposition: form-data` and the `name` of its field")
    return name.decode("utf-8", "replace")


def _header_value(value: bytes) -> tuple[bytes, Mapping[bytes, bytes] | None]:
    """Return a header's value in lower case and its parameters; None: these can't be told apart, or one comes twice."""
    kind, semicolon, _ = value.partition(b";")
    parameters: dict[bytes, bytes] = {}
    at = len(kind)
    while at < len(value):
        found = _PARAMETER.match(value, at)
        if found is None or (found[1] or b"").lower() in parameters:
            return kind.strip().lower(), None
        if found[1] is not None:
            parameters[found[1].lower()] = found[2] if found[2] is not None else found[3]
        at = found.end()
    return kind.strip().lower(), parameters if semicolon else {}


def _malformed(what: str) -> InvalidRequest:
    return InvalidRequest(f"The form {what}. Have a library for HTTP write it.")
