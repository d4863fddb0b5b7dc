"""Small files that begin as pictures and sounds do, in all sizes, and how they are sent. Nothing here decodes them."""

from __future__ import annotations

import base64
import random

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(40))
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(40)
MP3 = b"ID3\x04" + bytes(40)


def picture(num_bytes: int, seed: int = 0) -> bytes:
    """Return so many bytes that begin as a PNG does."""
    return (PNG + random.Random(seed).randbytes(max(0, num_bytes - len(PNG))))[:num_bytes]


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, content_type: str = "image/png") -> str:
    return f"data:{content_type};base64,{base64_of(data)}"
