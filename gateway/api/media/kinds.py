"""Tells what a file is: a picture or a sound by its first bytes, a document by its content type or name."""

from __future__ import annotations

import mimetypes
from pathlib import PurePath
from typing import Literal

Kind = Literal["picture", "sound"]

KNOWN = "PNG, JPEG, GIF, WebP, BMP, WAV, MP3, FLAC or Ogg"
"""The formats that are told apart by their first bytes, for error messages."""

HEAD_BYTES = 16
"""Number of a file's first bytes that `kind_of` looks at."""

_BEGINNINGS: tuple[tuple[bytes, Kind], ...] = (
    (b"\x89PNG\r\n\x1a\n", "picture"),
    (b"\xff\xd8\xff", "picture"),
    (b"GIF87a", "picture"),
    (b"GIF89a", "picture"),
    (b"fLaC", "sound"),
    (b"OggS", "sound"),
)
_WORDS: tuple[tuple[bytes, Kind], ...] = ((b"BM", "picture"), (b"ID3", "sound"))
"""Beginnings that a text can have as well. In these files a zero byte follows soon, which no text has."""
_IN_RIFF: dict[bytes, Kind] = {b"WEBP": "picture", b"WAVE": "sound"}
_FRAME_SYNC = 0xE0
"""Bits of an MP3 frame's second byte that are all set; those of its layer are not all zero, as they are in AAC."""
_LAYER = 0x06

_TEXT = "text/plain"
_TEXTS = frozenset((".log", ".md", ".sh", ".sql", ".toml", ".ts", ".yaml", ".yml"))
"""Endings of texts that have no type where the system has no table of its own, or another one."""
MAX_NAME_CHARS = 256
"""Characters at the end of a file's name that are looked at."""

_KIND_OF_TYPE: dict[str, Kind] = {"image": "picture", "audio": "sound"}
NAME_OF: dict[Kind, str] = {"picture": "a picture", "sound": "a sound"}


def kind_of(data: bytes) -> Kind | None:
    """Return whether a file is a picture or a sound, by its first bytes; None: neither is recognised.

    Sources: the signatures in the specifications of PNG, JPEG (JFIF), GIF, BMP, RIFF, FLAC, Ogg, ID3 and MPEG audio."""
    head = data[:HEAD_BYTES]
    if head[:4] == b"RIFF":
        return _IN_RIFF.get(head[8:12])
    for beginning, kind in (*_BEGINNINGS, *(_WORDS if b"\0" in head else ())):
        if head.startswith(beginning):
            return kind
    is_frame = len(head) > 1 and head[0] == 0xFF and head[1] & _FRAME_SYNC == _FRAME_SYNC and head[1] & _LAYER
    return "sound" if is_frame else None


def bare_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case; empty: there is none."""
    return content_type.partition(";")[0].strip().lower()


def kind_of_type(content_type: str) -> Kind | None:
    """Return the kind of medium that a content type without parameters names; None: it names another kind of file."""
    return _KIND_OF_TYPE.get(content_type.partition("/")[0])


def is_text(content_type: str) -> bool:
    """Return whether files of this content type, given without parameters, are texts that a model can read as such."""
    return content_type.startswith("text/") or content_type == "application/json" or content_type.endswith("+json")


def type_of_name(filename: str) -> str:
    """Return the content type that a file's name stands for; empty: its ending is not known."""
    ending = PurePath(filename[-MAX_NAME_CHARS:]).suffix.lower()
    return _TEXT if ending in _TEXTS else mimetypes.guess_type(filename[-MAX_NAME_CHARS:], strict=False)[0] or ""
