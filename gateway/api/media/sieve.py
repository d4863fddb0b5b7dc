"""Cuts the files out of a JSON body while it comes in, so that nothing later handles megabytes of base64.

A body of 32 MiB that is one picture would be scanned, decoded from JSON and decoded from base64 in calls that hold the
interpreter for tens of milliseconds each, and lie in memory twice. Here the base64 of each slice is decoded as it
comes, and what stays of the body is its text, with a short name (a token) in place of each file. Tokens have a random
part: no caller can write one. The strings that are cut are found by the name of the field before them, so other texts
cost nothing. A field of such a name can hold an ordinary text as well: `restored` puts it back.
"""

from __future__ import annotations

import binascii
import re
import secrets
from base64 import b64encode
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO

from workers.protocol.framing import BASE64_CHARS, BASE64_GROUP, PART_CHARS

LEAST_BYTES = 3 << 10
"""Files of fewer bytes are left in the text."""
LEAST_CHARS = 512
"""Characters of base64 with which a file's string begins at least. Shorter strings are passed over by the search
itself: a slice can have three thousand of them."""
TAIL_BYTES = 2048
"""Bytes at the end of a slice in which a beginning of a file's string may lie that goes on in the next slice."""

_URL = rb'(?:data:(?:[^",\\]|\\/){0,256};base64,)?(?=[A-Za-z0-9+/\\]{%d})' % LEAST_CHARS
_BEGIN = re.compile(
    rb'(?<!\\)"(?:(?:url|image_url|data|file_data)"\s{0,64}:\s{0,64}'
    rb'|(multimodal_data"\s{0,64}:\s{0,64}\[\s{0,64}))"' + _URL
)
_NEXT = re.compile(rb'"\s{0,64},\s{0,64}"' + _URL)
"""Finds what lies between two items of an array of files: the end of one string and the begin of the next."""
_SHORT = re.compile(rb'(?:"\s{0,64},\s{0,64}"[^"\\]{0,%d}(?="))+' % (LEAST_CHARS + 512))
"""Finds the end of one item of such an array and the short items after it."""
_NAMES = (b'url"', b'data"')
"""The ends of the names of fields that can hold a file: a slice without them needs no search."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A file that was cut out of a body."""

    data: bytes
    sha256: bytes
    last: bytes
    """The last group of its base64 as it was sent: the only one that can be written in several ways."""

    @property
    def num_chars(self) -> int:
        """The number of characters that its base64 had."""
        return -(-len(self.data) // BASE64_GROUP) * BASE64_CHARS

    def base64(self) -> Iterator[bytes]:
        """Yield the base64 that was cut, in parts."""
        step = PART_CHARS - PART_CHARS % BASE64_GROUP
        for start in range(0, len(self.data), step):
            encoded = b64encode(self.data[start : start + step])
            yield encoded if start + step < len(self.data) else encoded[:-BASE64_CHARS] + self.last


class _File:
    """A file whose base64 is coming in."""

    __slots__ = ("_digest", "_whole", "rest")

    def __init__(self) -> None:
        self._whole = BytesIO()
        self._digest = sha256()
        self.rest = b""
        """The last characters, 4 to 7, which are decoded when the next ones or the end of the string have come."""

    @property
    def num_bytes(self) -> int:
        return self._whole.tell()

    def add(self, text: bytes, as_sent: bytes) -> bytes:
        """Add characters (`as_sent`: with what escapes slashes). Return those that can't be decoded, as they were sent;
        empty: all can, or are kept for later."""
        before, text = self.rest, self.rest + text
        end = max(0, len(text) - len(text) % BASE64_CHARS - BASE64_CHARS)
        if b"\\" in text or text[:end].endswith(b"=") or not self._decode(text[:end]):
            self.rest = b""
            return before + as_sent
        self.rest = text[end:]
        return b""

    def end(self) -> bytes:
        """Decode the last characters. Return them if they can't be decoded."""
        return b"" if self._decode(self.rest) else self.rest

    def _decode(self, text: bytes) -> bool:
        if len(text) % BASE64_CHARS or text.endswith(b"==="):
            return False
        try:
            data = binascii.a2b_base64(text, strict_mode=True) if text else b""
        except binascii.Error:
            return False
        self._whole.write(data)
        self._digest.update(data)
        return True

    def cut(self) -> Cut:
        """Return the file as far as it has come."""
        return Cut(self._whole.getvalue(), self._digest.digest(), self.rest[-BASE64_CHARS:])


class MediaSieve:
    """Cuts files out of one JSON text, which is fed to it in slices."""

    def __init__(self) -> None:
        self._name = f"@{secrets.token_hex(8)}."
        self.cuts: dict[str, Cut] = {}
        """Token -> the file for which it stands in the text."""
        self._held = b""
        self._file: _File | None = None
        self._in_array = False
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all files so far."""
        return self._num_bytes + (self._file.num_bytes if self._file is not None else 0)

    def feed(self, piece: bytes) -> bytes:
        """Take the next slice; return the text that is left of it and of what was held back before."""
        return self._sift(piece, is_last=False)

    def finish(self) -> bytes:
        """Return the rest of the text. Nothing is fed after it."""
        return self._sift(b"", is_last=True)

    def _sift(self, piece: bytes, *, is_last: bool) -> bytes:
        data, self._held = self._held + piece, b""
        kept: list[bytes] = []
        at = 0
        while at < len(data):
            at = self._outside(data, at, kept, is_last) if self._file is None else self._inside(data, at, kept)
        if is_last and self._file is not None:  # the body ends within a string, so it is no JSON
            kept += (self._ended(self._file.end()), self._held)
        return b"".join(kept)

    def _outside(self, data: bytes, at: int, kept: list[bytes], is_last: bool) -> int:
        """Pass text on up to the next file. Return where that begins, or the end of `data`."""
        last = len(data) if is_last else len(data) - TAIL_BYTES
        if self._in_array:
            if at > last and not is_last:
                self._held = data[at:]
                return len(data)
            found = _NEXT.match(data, at)
            if found is None:
                short = _SHORT.match(data, at)
                self._in_array = short is not None
                kept.append(data[at : at if short is None else short.end()])
                return at if short is None else short.end()
        else:
            is_possible = any(data.find(name, at) >= 0 for name in _NAMES)
            found = _BEGIN.search(data, at) if is_possible else None
        if found is not None and found.start() <= last:
            kept.append(data[at : found.end()])
            self._in_array = self._in_array or found[1] is not None
            self._file = _File()
            return found.end()
        end = max(at, last if found is None else min(last, found.start()))
        if not is_last and end > at and data[end - 1] == ord("\\"):
            end -= 1  # a quote after it is none
        kept.append(data[at:end])
        self._held = data[end:]
        return len(data)

    def _inside(self, data: bytes, at: int, kept: list[bytes]) -> int:
        """Decode the file's base64 in `data`. Return where the file's string ends, or the end of `data`."""
        file, end = self._file, data.find(b'"', at)
        if file is None:
            return at
        text = data[at:] if end < 0 else data[at:end]
        if end < 0 and text.endswith(b"\\"):
            text, self._held = text[:-1], b"\\"
        left = file.add(text.replace(b"\\/", b"/"), text)
        if not left and end >= 0:
            left = file.end()
        if left or end >= 0:
            kept.append(self._ended(left))
        if left and self._held:
            kept.append(self._held)
            self._held = b""
        return len(data) if end < 0 else end

    def _ended(self, left: bytes) -> bytes:
        """End the file; return what stands for it in the text. `left`: characters behind it that are no base64."""
        file, self._file = self._file, None
        if file is None:
            return left
        if left:
            self._in_array = False
            file.rest = b""
        cut = file.cut()
        if left and cut.data:  # cut before the last group, which is whole: 3 bytes for 4 characters
            cut = Cut(cut.data, cut.sha256, b64encode(cut.data[-BASE64_GROUP:]))
        if len(cut.data) < LEAST_BYTES:
            return b"".join(cut.base64()) + left
        token = f"{self._name}{len(self.cuts)}@"
        self.cuts[token] = cut
        self._num_bytes += len(cut.data)
        return token.encode() + left


_TOKEN = re.compile(rb"@[0-9a-f]{16}\.[0-9]{1,9}@")
_TOKEN_BYTES = 28
"""Maximum bytes of a token."""
_WINDOW_BYTES = 256 << 10
"""Bytes that are searched for a token in one call."""


def tokens_in(text: bytes) -> Iterator[tuple[bytes, str]]:
    """Yield a text in parts: each with the token that follows it, or an empty string."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _WINDOW_BYTES)
        found = _TOKEN.search(text, start, end)
        if found is None:
            end = end if end == len(text) else end - _TOKEN_BYTES
            yield text[start:end], ""
            start = end
        else:
            yield text[start : found.start()], found[0].decode()
            start = found.end()


def restored(text: bytes, cuts: Mapping[str, Cut], but: Container[str] = ()) -> Iterator[bytes]:
    """Yield a text in parts, with the files' base64 in place of their tokens, except of those in `but`."""
    if not cuts:
        yield text
        return
    for before, token in tokens_in(text):
        yield before
        if token in cuts and token not in but:
            yield from cuts[token].base64()
        else:
            yield token.encode()
