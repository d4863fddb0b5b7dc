"""Reads the head of a picture's file: its form, its size, and whether decoding it could take long. Standard library
only, and nothing is unpacked: this stands before the library that decodes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workers.media.messages import Undecodable

Form = Literal["PNG", "JPEG", "WebP", "GIF", "BMP"]

MAX_SCANS = 32
"""Maximum scans of a JPEG file. Each goes over the whole picture, however few bytes it has: with thousands a file of
a megabyte takes minutes. Encoders make 10, those that search for the smallest file some more."""

MAX_SEGMENTS = 4096
"""Maximum pieces of a file before its pixels. Each takes microseconds in Python, and in a file of megabytes there is
room for a million. Files with large profiles have some hundreds."""

MAX_CHUNKS = 1 << 16
"""Maximum chunks of a PNG file: most encoders make them of 8 KiB or larger, one of 1 KiB."""

SOI, SOS = 0xD8, 0xDA
FRAMES = range(0xC0, 0xD0)
NO_FRAMES = frozenset({0xC4, 0xC8, 0xCC})
"""Markers in the range of frames that are something else: tables, and one that is reserved."""
READ_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Baseline, extended and progressive, with Huffman's codes. What else there is nobody sends, and it is slow."""
ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers without a length."""


@dataclass(frozen=True, slots=True)
class Head:
    form: Form
    width: int
    height: int


def read_head(data: bytes) -> Head:
    """Return what a picture's head says. Raises Undecodable if the file is none that is read, or its head is cut."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _gif(data)
        if data.startswith(b"BM"):
            return _bmp(data)
    except (struct.error, IndexError):
        raise Undecodable("the picture's file is cut off in its head; send the whole file") from None
    if not data:
        raise Undecodable("the picture's file is empty; send the whole file")
    raise Undecodable("the picture is no PNG, JPEG, WebP, GIF or BMP file; convert it to one of them")


def _png(data: bytes) -> Head:
    kind, width, height = struct.unpack_from(">4sII", data, 12)
    if kind != b"IHDR":
        raise Undecodable("the PNG file is damaged: its first chunk is no IHDR; encode it anew")
    position, number, before_pixels = 8, 0, 0
    has_pixels = False
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        number += 1
        has_pixels = has_pixels or kind == b"IDAT"
        before_pixels += not has_pixels
        if number > MAX_CHUNKS or before_pixels > MAX_SEGMENTS:
            raise Undecodable("the PNG file has too many chunks; encode it anew")
        position += 12 + length
    return Head("PNG", width, height)


def _jpeg(data: bytes) -> Head:
    size = None
    for marker, position in _jpeg_segments(data):
        if marker in FRAMES and marker not in NO_FRAMES and size is None:
            if marker not in READ_FRAMES:
                raise Undecodable("the JPEG file has arithmetic codes or no loss, which is not read; save it as usual")
            height, width = struct.unpack_from(">HH", data, position + 3)
            size = width, height
        if marker == SOS:
            break
    if size is None:
        raise Undecodable("the JPEG file is cut off before its pixels, or damaged; send the whole file")
    # In the pixels' codes no 0xFF is followed by this marker, but a preview or a profile may contain it.
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise Undecodable(
            f"the JPEG file has more than the {MAX_SCANS} scans that are read; save it without progression"
        )
    return Head("JPEG", *size)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the markers of a JPEG file that have a length, and where that stands, up to the first scan."""
    position = 2
    for _ in range(MAX_SEGMENTS):
        position = data.find(b"\xff", position)
        if position < 0:
            return
        while data[position] == 0xFF:
            position += 1
        marker = data[position]
        position += 1
        if marker == 0 or marker in ALONE:
            continue
        (length,) = struct.unpack_from(">H", data, position)
        yield marker, position
        if marker == SOS:
            return
        position += max(length, 2)
    raise Undecodable(f"the JPEG file has more than {MAX_SEGMENTS:,} segments before its pixels; encode it anew")


def _webp(data: bytes) -> Head:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        if len(data) < 30:
            raise IndexError
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise Undecodable("the WebP file is cut off in its head or damaged; send the whole file")
    return Head("WebP", width, height)


def _gif(data: bytes) -> Head:
    """Return the size of the screen, or of the first frame where that is larger."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _gif_colours(flags)
    for _ in range(MAX_SEGMENTS):
        block = data[position]
        if block == 0x2C:
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, position + 1)
            return Head("GIF", max(width, left + frame_width), max(height, top + frame_height))
        position += 1
        if block == 0x21:
            position = _after_extension(data, position + 1)
    raise Undecodable(f"the GIF file has more than {MAX_SEGMENTS:,} blocks before its first picture; encode it anew")


def _after_extension(data: bytes, position: int) -> int:
    """Return where a GIF's extension ends, of which pieces of up to 255 bytes begin at `position`."""
    for _ in range(MAX_SEGMENTS):
        length = data[position]
        position += 1 + length
        if not length:
            return position
    raise Undecodable(f"the GIF file has an extension of more than {MAX_SEGMENTS:,} pieces; encode it anew")


def _gif_colours(flags: int) -> int:
    """Return how many bytes of colours follow, as the flags say."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _bmp(data: bytes) -> Head:
    (size,) = struct.unpack_from("<I", data, 14)
    if size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return Head("BMP", width, height)
    width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression not in (0, 3):
        raise Undecodable("the BMP file is compressed, which is not read; save it as PNG")
    return Head("BMP", width, abs(height))
