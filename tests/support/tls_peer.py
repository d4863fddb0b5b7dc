"""A TLS client that sends what no ordinary one would: records of any content and size, KeyUpdates without end.

Python's module has no function for KeyUpdate, so this calls the library that it is built on.
"""

from __future__ import annotations

import ctypes
import socket
from types import TracebackType
from typing import Any, Self

LIBRARIES = ("libssl.so.3", "libssl.3.dylib", "libssl.so.1.1")
HEAD_BYTES = 5
"""Bytes of a record's head; the last two tell how many follow."""
READ_BYTES = 1 << 16
HANDSHAKE = 22
"""Type of records of a handshake (RFC 8446, 5.1)."""

_UPDATE_NOT_REQUESTED, _UPDATE_REQUESTED = 0, 1
_TLS_1_2, _SET_MAX_VERSION = 0x0303, 124
_WANT_READ = 2


def _load() -> Any:
    """Return OpenSSL's library; None: this machine has none that is known."""
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        pointer, size = ctypes.c_void_p, ctypes.c_int
        for function, result, given in (
            ("TLS_client_method", pointer, ()),
            ("SSL_CTX_new", pointer, (pointer,)),
            ("SSL_CTX_ctrl", ctypes.c_long, (pointer, size, ctypes.c_long, pointer)),
            ("SSL_CTX_free", None, (pointer,)),
            ("SSL_new", pointer, (pointer,)),
            ("SSL_free", None, (pointer,)),
            ("BIO_s_mem", pointer, ()),
            ("BIO_new", pointer, (pointer,)),
            ("BIO_read", size, (pointer, pointer, size)),
            ("BIO_write", size, (pointer, ctypes.c_char_p, size)),
            ("SSL_set_bio", None, (pointer, pointer, pointer)),
            ("SSL_set_connect_state", None, (pointer,)),
            ("SSL_do_handshake", size, (pointer,)),
            ("SSL_get_error", size, (pointer, size)),
            ("SSL_read", size, (pointer, pointer, size)),
            ("SSL_write", size, (pointer, ctypes.c_char_p, size)),
            ("SSL_shutdown", size, (pointer,)),
            ("SSL_key_update", size, (pointer, size)),
        ):
            declared = getattr(library, function)
            declared.restype, declared.argtypes = result, given
        return library
    return None


_library = _load()
IS_THERE = _library is not None
"""Whether this machine has the library."""


class TlsPeer:
    """One client in memory: what `encrypted` returns is to be sent, what comes goes into `received`."""

    def __init__(self, *, is_old: bool = False) -> None:
        """`is_old`: speaks TLS 1.2."""
        self._context = _library.SSL_CTX_new(_library.TLS_client_method())
        if is_old:
            _library.SSL_CTX_ctrl(self._context, _SET_MAX_VERSION, _TLS_1_2, None)
        self._tls = _library.SSL_new(self._context)
        memory = _library.BIO_s_mem()
        self._in, self._out = _library.BIO_new(memory), _library.BIO_new(memory)
        _library.SSL_set_bio(self._tls, self._in, self._out)
        _library.SSL_set_connect_state(self._tls)
        self._room = ctypes.create_string_buffer(READ_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _library.SSL_free(self._tls)
        _library.SSL_CTX_free(self._context)

    def shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is complete, but for what `encrypted` returns now."""
        done = int(_library.SSL_do_handshake(self._tls))
        if done != 1 and _library.SSL_get_error(self._tls, done) != _WANT_READ:
            raise ConnectionError("the handshake failed")
        return done == 1

    def shake_hands_by(self, connection: socket.socket) -> None:
        """Shake hands over a socket that blocks."""
        while not self.shake_hands():
            connection.sendall(self.encrypted())
            self.received(connection.recv(READ_BYTES))
        connection.sendall(self.encrypted())

    def received(self, data: bytes) -> None:
        """Take encrypted bytes that the other side has sent."""
        if not data:
            raise ConnectionError("the other side has closed")
        _library.BIO_write(self._in, data, len(data))

    def content(self) -> bytes:
        """Return what the other side has said so far."""
        found = b""
        while (size := _library.SSL_read(self._tls, self._room, READ_BYTES)) > 0:
            found += self._room.raw[:size]
        return found

    def say(self, *contents: bytes) -> None:
        """Write a record for each."""
        for content in contents:
            _library.SSL_write(self._tls, content, len(content))

    def update_keys(self, count: int, *, asks: bool = False) -> None:
        """Write so many KeyUpdates; `asks`: each asks the other side for one."""
        for _ in range(count):
            _library.SSL_key_update(self._tls, _UPDATE_REQUESTED if asks else _UPDATE_NOT_REQUESTED)
            _library.SSL_do_handshake(self._tls)

    def end(self) -> None:
        """Write that nothing more comes."""
        _library.SSL_shutdown(self._tls)

    def encrypted(self) -> bytes:
        """Return what has been written since the last call."""
        found = []
        while (size := _library.BIO_read(self._out, self._room, READ_BYTES)) > 0:
            found.append(self._room.raw[:size])
        return b"".join(found)


def in_fragments(handshake: bytes, size: int) -> bytes:
    """Return records of a handshake that is not encrypted yet, cut into records of `size` bytes."""
    found, at = b"", 0
    while at < len(handshake):
        end = at + HEAD_BYTES + int.from_bytes(handshake[at + 3 : at + HEAD_BYTES])
        content, version = handshake[at + HEAD_BYTES : end], handshake[at + 1 : at + 3]
        for start in range(0, len(content), size):
            piece = content[start : start + size]
            found += bytes([HANDSHAKE]) + version + len(piece).to_bytes(2) + piece
        at = end
    return found
