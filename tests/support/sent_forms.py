"""Forms as clients send them, and as no client does."""

from __future__ import annotations

BOUNDARY = b"paddock-test-boundary"
CONTENT_TYPE = b"multipart/form-data; boundary=" + BOUNDARY


def part(name: str, value: bytes, more: str = "", headers: bytes = b"") -> bytes:
    """Return a part behind its boundary. `more`: further parameters of its disposition; `headers`: further lines."""
    disposition = f'form-data; name="{name}"' + (f"; {more}" if more else "")
    head = b"Content-Disposition: " + disposition.encode() + b"\r\n" + headers
    return b"--" + BOUNDARY + b"\r\n" + head + b"\r\n" + value + b"\r\n"


def form(*fields: tuple[str, str | bytes]) -> bytes:
    """Return a whole form; bytes are sent as files."""
    parts = [
        part(name, value.encode()) if isinstance(value, str) else part(name, value, 'filename="sound"')
        for name, value in fields
    ]
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"
