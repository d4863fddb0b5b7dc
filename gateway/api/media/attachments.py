"""Makes `Medium`s of what a request's fields hold: base64, `data:` URLs, and links to files that are fetched later."""

from __future__ import annotations

import binascii
import codecs
from collections.abc import Iterator, Mapping
from hashlib import sha256

from gateway.api.intake.decoding import INLINE_BYTES, let_loop_run
from gateway.api.media.kinds import KNOWN, NAME_OF, Kind, bare_type, is_text, kind_of, kind_of_type
from gateway.api.media.sieve import Cut, restored, tokens_in
from gateway.errors import InvalidRequest, NotSupported
from workers.protocol.framing import BASE64_CHARS, PART_CHARS
from workers.protocol.requests import Medium

MAX_MEDIA = 32
"""Maximum pictures and sounds of one request, those of its conversation included."""
MAX_URL_CHARS = 8192
MIB = 1 << 20
DEFAULT_MAX_BYTES = 20 * MIB
DEFAULT_MAX_TEXT_CHARS = 8 * MIB
WIDEST_CHAR = 4
"""Bytes of memory that a character of a text takes at most."""

UNTOLD = ("", "application/octet-stream")
"""Content types that say nothing about a file."""
DATA_URL = "data:"
LINKS = ("http://", "https://")
_BLANKS = str.maketrans("", "", " \t\r\n")


class LinkedMedium(Medium, frozen=True):
    """A medium whose file is still to be fetched; `data` is empty. Workers never get one (`MediaLoader`)."""

    url: str = ""
    is_document: bool = False
    """Whether the file may also be a text, which then takes the medium's place in its message."""


class Attachments:
    """The files that were cut out of one body, and which of them a reader of the body has taken for media."""

    def __init__(
        self,
        cuts: Mapping[str, Cut] | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_text_chars: int = DEFAULT_MAX_TEXT_CHARS,
    ) -> None:
        """`cuts`: token -> the file for which it stands. `max_bytes`: maximum bytes of one medium. `max_text_chars`:
        maximum characters of all documents that become texts."""
        self.max_text_chars = max_text_chars
        self.num_text_bytes = 0
        """Bytes of memory that the documents take that have become texts, estimated from above."""
        self.num_bytes = 0
        """The bytes of all files that were cut out."""
        self.num_loose_bytes = 0
        """The bytes of files that were read from base64 which was not cut out, as in messages of a WebSocket. A file
        counts each time that it is read."""
        self.num_chars = 0
        """The characters that the base64 of all files had."""
        self.num_chars_left = 0
        """The characters of base64 that belong to ordinary texts, since no reader took them for media."""
        self._cuts: dict[str, Cut] = {}
        self._max_bytes = max_bytes
        self._taken: set[str] = set()
        self.add(cuts or {})

    @property
    def are_quick(self) -> bool:
        """Whether they are few, and short if they are no pictures or sounds, as they may become texts."""
        if len(self._cuts) > MAX_MEDIA:
            return False
        return sum(len(cut.data) for cut in self._cuts.values() if kind_of(cut.data) is None) <= INLINE_BYTES

    def add(self, cuts: Mapping[str, Cut]) -> None:
        """Add files that were cut out of a body or a stored response. There can be thousands: they are counted once."""
        self._cuts |= cuts
        num_chars = sum(cut.num_chars for cut in cuts.values())
        self.num_bytes += sum(len(cut.data) for cut in cuts.values())
        self.num_chars += num_chars
        self.num_chars_left += num_chars

    def restored(self, text: bytes) -> bytes:
        """Return the body's text with all that belongs there: the base64 that no reader took for media."""
        return _joined(restored(text, self._cuts, self._taken))

    def whole(self, text: bytes) -> bytes:
        """Return a text with the base64 of all files in it."""
        return _joined(self.parts(text)) if self._cuts else text

    def parts(self, text: bytes) -> Iterator[bytes]:
        """Yield a text with the base64 of all files in it, in parts."""
        return restored(text, self._cuts)

    def num_chars_in(self, text: bytes) -> int:
        """Return the characters of base64 that `whole(text)` has in place of tokens."""
        found = (self._cuts.get(token) for _, token in tokens_in(text)) if self._cuts else ()
        return sum(cut.num_chars for cut in found if cut is not None)

    def medium(self, value: str, path: str, kind: Kind | None, param: str) -> Medium:
        """Return the medium that a field holds: a `data:` URL, a link or base64. `path`: the field. `kind`: what
        belongs there; None: its first bytes tell. `param`: `Medium.param`.

        Raises InvalidRequest, NotSupported."""
        if is_link(value):
            check_url(value, path)
            return LinkedMedium(kind or "picture", b"", param, url=value)
        named = ""
        if is_data_url(value):
            named, value = _of_data_url(value, path)
        elif "://" in value[:32] or value.startswith("file:"):
            scheme = value.partition(":")[0][:16]
            message = f"`{path}` is a URL of scheme `{scheme}`. Send a `data:` URL, or one of http or https."
            raise InvalidRequest(message, param=path)
        data, digest = self._decoded(value, path)
        found = kind_of(data) or kind_of_type(named) or (kind if named in UNTOLD else None)
        if found is None:
            raise InvalidRequest(f"`{path}` is no file that is recognised. Send {KNOWN}.", param=path)
        if kind is not None and found != kind:
            message = f"`{path}` is {NAME_OF[found]}, and {NAME_OF[kind]} belongs there. Send it in a part of its kind."
            raise InvalidRequest(message, param=path)
        return Medium(found, data, param, digest)

    def document(self, value: str, content_type: str, path: str, param: str) -> Medium | str:
        """Return the medium or the text that a file is. `value` as in `medium`, but no link; `content_type`: without
        parameters, empty if it is not known. Raises InvalidRequest, NotSupported."""
        if is_data_url(value):
            named, value = _of_data_url(value, path)
            content_type = named or content_type
        data, digest = self._decoded(value, path)
        kind = kind_of(data) or kind_of_type(content_type)
        if kind is not None:
            return Medium(kind, data, param, digest)
        check_length(len(data), self.max_text_chars, path)
        text = text_of(data, content_type, path)
        self.num_text_bytes += WIDEST_CHAR * len(text)
        return text

    def _decoded(self, value: str, path: str) -> tuple[bytes, bytes]:
        """Return the file and its SHA-256."""
        cut = self._cuts.get(value)
        if cut is not None:
            if value not in self._taken:
                self._taken.add(value)
                self.num_chars_left -= cut.num_chars
            data, digest = cut.data, cut.sha256
        else:
            data = _decode(value, path)
            self.num_loose_bytes += len(data)
            digest = sha256(data).digest()
        check_size(data, self._max_bytes, path)
        return data, digest


def is_link(value: str) -> bool:
    """Return whether a field's value is a URL from which a file may be fetched."""
    return value[:8].lower().startswith(LINKS)


def check_url(url: str, path: str) -> None:
    """Raise InvalidRequest for a long URL: reading one of a megabyte takes 20 ms, and yarl keeps what it has read."""
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"`{path}` has more than {MAX_URL_CHARS} characters. Send a shorter URL.", param=path)


def is_data_url(value: str) -> bool:
    return value[:5].lower() == DATA_URL


def check_size(data: bytes, max_bytes: int, path: str) -> None:
    """Raise InvalidRequest for an empty file, or one of more than `max_bytes`."""
    if not data:
        raise InvalidRequest(f"`{path}` is empty. Send a file.", param=path)
    if len(data) > max_bytes:
        raise InvalidRequest(
            f"`{path}` has {len(data)} bytes; a picture or sound may have {max_bytes}. Send a smaller one, or have the "
            "operator raise PADDOCK_MAX_MEDIA_MIB.",
            param=path,
        )


def check_length(num_chars: int, most: int, path: str) -> None:
    """Raise InvalidRequest if documents that become texts are too long."""
    if num_chars > most:
        raise InvalidRequest(
            f"`{path}` makes {num_chars} characters of text from files; a request may have {most}. Send shorter texts, "
            "or have the operator raise PADDOCK_MAX_BODY_BYTES.",
            param=path,
        )


def text_of(data: bytes, content_type: str, path: str) -> str:
    """Return the text that a document is. Raises NotSupported for a document that is none, InvalidRequest."""
    if not is_text(content_type):
        told = f"of type {content_type!r}" if content_type else "of a type that is not known"
        raise NotSupported(
            f"`{path}` is a file {told[:120]}. Paddock reads pictures, sounds and texts (text/*, JSON) only; send what "
            "it says as text, or its pages as pictures.",
            param=path,
        )
    try:
        return "".join(_text_pieces(data))
    except UnicodeDecodeError:
        raise InvalidRequest(f"`{path}` is no text in UTF-8. Encode it as UTF-8.", param=path) from None


def _text_pieces(data: bytes) -> Iterator[str]:
    """Decode UTF-8 in pieces, between which other threads can run: 8 MiB at once hold the interpreter for 10 ms."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    for start in range(0, len(data), PART_CHARS):
        yield decoder.decode(data[start : start + PART_CHARS], final=start + PART_CHARS >= len(data))
        let_loop_run()


def _of_data_url(url: str, path: str) -> tuple[str, str]:
    """Return the content type and the base64 of a `data:` URL. Raises InvalidRequest for one without base64."""
    head, comma, value = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        message = f"`{path}` is a `data:` URL without base64. Send `data:<type>;base64,<characters>`."
        raise InvalidRequest(message, param=path)
    return bare_type(head[len(DATA_URL) :]), value


def _decode(value: str, path: str) -> bytes:
    """Decode base64, which may have line breaks and lack its padding, in steps between which other threads can run."""
    text = value.translate(_BLANKS) if any(blank in value[:128] for blank in " \t\r\n") else value
    text += "=" * (-len(text) % BASE64_CHARS)
    try:
        return b"".join(_pieces(text))
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"`{path}` is no base64. Send the file's bytes as standard base64.", param=path) from None


def _pieces(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), PART_CHARS):
        piece = text[start : start + PART_CHARS]
        if start + PART_CHARS < len(text) and piece.endswith("="):
            raise ValueError("padding within")
        yield binascii.a2b_base64(piece, strict_mode=True)
        let_loop_run()


def _joined(parts: Iterator[bytes]) -> bytes:
    pieces: list[bytes] = []
    for part in parts:
        pieces.append(part)
        let_loop_run()
    return b"".join(pieces)
