"""Files that only holders of one secret can have written: header, parts, and a seal, the HMAC-SHA256 over both.

Their contents are parsed in C++ by llama.cpp, so no part of a file is used before its seal is checked. A file appears
whole or not at all: it is written under another name, synced, and renamed. Layout, little-endian, sizes in bytes:

    magic 8, format 2, kind 2, zero 4, fingerprint 32, digest 32, start 4, end 4, length 8; the parts; seal 32
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Self

MAGIC = b"PADDOCK\x00"
FORMAT = 1
HEADER = struct.Struct("<8sHHI32s32sIIQ")
SEAL_BYTES = 32
SEALED_OVERHEAD = HEADER.size + SEAL_BYTES
"""Bytes that a file has beside its contents: header and seal."""
ALGORITHM = "sha256"
TEMPORARY = ".tmp"
"""Suffix of the names of files that are being written."""

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_PER_READ = 1 << 30  # Linux reads at most 2 GiB at once
_PIECE_BYTES = 8 << 20
_MOST_PARTS_PER_WRITE = 16  # the least IOV_MAX that POSIX allows (Linux: 1,024); the rest is written next


class FileRefused(ValueError):
    """Raised if a file can't be trusted or used; the message says why, for a log line."""


class Kind(IntEnum):
    BLOCK = 1
    """The saved KV of one block of tokens."""
    CONVERSATION = 2
    """Tokens and blocks of a whole conversation."""
    STATE = 3
    """The saved state of a whole conversation, for kinds of memory that can't be cut into ranges of tokens."""


@dataclass(frozen=True, slots=True)
class Label:
    """The statements of a file's header about the file's contents. The seal covers it."""

    kind: Kind
    fingerprint: bytes
    """Fingerprint of model, llama.cpp and settings, 32 bytes."""
    digest: bytes
    """Digest of the inputs that the contents are computed from, 32 bytes."""
    start: int
    end: int
    """The file holds tokens [start, end) of the conversation."""

    def header(self, length: int) -> bytes:
        return HEADER.pack(MAGIC, FORMAT, self.kind, 0, self.fingerprint, self.digest, self.start, self.end, length)


def write_sealed(
    folder: int,
    name: str,
    key: bytes,
    label: Label,
    parts: Sequence[bytes],
    *,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Write and sync a file, then rename it to `name`, replacing any file there; return the bytes written.

    Raises OSError; ECANCELED if `stop`, called every few MiB, returns True. `folder`: descriptor of an open folder,
    which the caller syncs."""
    header = label.header(sum(map(len, parts)))
    seal = hmac.new(key, header, ALGORITHM)
    for piece in _pieces(parts):
        _go_on_unless(stop)
        seal.update(piece)
    temporary = f".{secrets.token_hex(8)}{TEMPORARY}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
    try:
        try:
            written = _write_all(file, [header, *parts, seal.digest()], stop)
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        discard(folder, temporary)
        raise
    return written


def discard(folder: int, name: str) -> bool:
    """Unlink a name; return whether this call removed it. A link is removed, not followed."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


class SealedReader:
    """A file that is being read. Read all parts with `take`, then call `verify`: only then use the parts."""

    def __init__(self, folder: int, name: str, key: bytes, *, max_bytes: int) -> None:
        """Open the file. Raises FileNotFoundError, FileRefused and other OSErrors."""
        self._seal = hmac.new(key, digestmod=ALGORITHM)
        self._file = _open(folder, name)
        try:
            self.status = os.fstat(self._file)
            if not stat.S_ISREG(self.status.st_mode):
                raise FileRefused("it is not a plain file")
            if self.status.st_size > max_bytes:
                raise FileRefused(f"its {self.status.st_size:,} bytes are more than the {max_bytes:,} allowed")
            if self.status.st_size < HEADER.size + SEAL_BYTES:
                raise FileRefused(f"it is truncated: {self.status.st_size} bytes")
        except (FileRefused, OSError):
            os.close(self._file)
            raise

    @property
    def size(self) -> int:
        """Return the size of the whole file in bytes."""
        return self.status.st_size

    def label(self) -> tuple[Label, int]:
        """Read the header; return it (not yet verified) and the contents' length in bytes. Raises FileRefused."""
        magic, form, kind, zero, fingerprint, digest, start, end, length = HEADER.unpack(self.take(HEADER.size))
        if magic != MAGIC or zero:
            raise FileRefused("it is not a file of Paddock")
        if form != FORMAT or kind not in tuple(Kind):
            raise FileRefused(f"format {form}, kind {kind} is not known to this version")
        if HEADER.size + length + SEAL_BYTES != self.size:
            raise FileRefused(f"it is truncated or damaged: {self.size:,} bytes for {length:,} of contents")
        return Label(Kind(kind), fingerprint, digest, start, end), length

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes. Raises FileRefused if the file ends before."""
        data = _read_all(self._file, length)
        self._seal.update(data)
        return data

    def verify(self) -> None:
        """Read the seal; raise FileRefused unless it fits all that was read before and the file ends after it."""
        seal = _read_all(self._file, SEAL_BYTES)
        if not hmac.compare_digest(seal, self._seal.digest()) or os.read(self._file, 1):
            raise FileRefused("its seal does not fit: damaged, forged, or of another secret")

    def touch(self) -> None:
        """Set the file's time of last use to now, unless the disk takes no writes: it is read all the same."""
        with contextlib.suppress(OSError):
            os.utime(self._file)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(folder: int, name: str) -> int:
    try:
        # Non-blocking, since opening a pipe that somebody put there would wait.
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise FileRefused("it is a link") from None
        if error.errno == errno.ENXIO:
            raise FileRefused("it is not a plain file") from None
        raise


def _read_all(file: int, length: int) -> bytes:
    data = os.read(file, min(length, _MOST_PER_READ))
    if len(data) == length:
        return data
    parts = [data]
    left = length - len(data)
    while left:
        data = os.read(file, min(left, _MOST_PER_READ))
        if not data:
            raise FileRefused("it is truncated")
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def _pieces(parts: Sequence[bytes]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]


def _go_on_unless(stop: Callable[[], bool]) -> None:
    if stop():
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


def _write_all(file: int, parts: Sequence[bytes], stop: Callable[[], bool]) -> int:
    left = list(_pieces(parts))
    total = sum(map(len, left))
    while left:
        _go_on_unless(stop)
        written = os.writev(file, left[:_MOST_PARTS_PER_WRITE])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return total


FOLDER_HEX = 16
NAME_HEX = 40
STEM_HEX = 16
"""Number of hex digits at the end of a whole state's file name that are the state's mark, masked (see `CacheKeys`)."""


class CacheKeys:
    """Derives a key for each use from the secret, and makes names that nobody without the secret can make or guess.

    Names are HMACs of what the KV was computed from (`workers.engine.cache.prompt`), so they tell nothing of prompts or
    teams. States that end in one block have one stem: the digest of their full blocks. A state's file name ends in its
    mark, an HMAC of the stem, masked with a key. So one lookup per block of a prompt shows if any state ends in it."""

    __slots__ = ("_folders", "_masks", "_names", "_stems", "seal")

    def __init__(self, secret: str) -> None:
        """Derive the keys. Raises ValueError for an empty secret."""
        if not secret:
            raise ValueError("the cache's secret is empty")
        master = secret.encode()
        self._names = _derived(master, b"names of blocks")
        self._stems = _derived(master, b"stems of states")
        self._masks = _derived(master, b"masks of stems")
        self._folders = _derived(master, b"folders of teams")
        self.seal = _derived(master, b"seals of files")

    def tenant_folder(self, tenant: str | None) -> str:
        """Return the name of the folder of a team's files; for None, of the files that all teams share."""
        text = b"public" if tenant is None else b"team " + tenant.encode("utf-8", "surrogatepass")
        return hmac.digest(self._folders, text, "sha256").hex()[:FOLDER_HEX]

    def file_name(self, fingerprint: bytes, digest: bytes, stem: bytes = b"") -> str:
        """Return the name of a block's file or, with `stem` (digest of its full blocks), of a whole state's file."""
        name = hmac.digest(self._names, fingerprint + digest, "sha256").hex()[:NAME_HEX]
        return name + self._masked(name, self.stem_mark(fingerprint, stem)) if stem else name

    def stem_mark(self, fingerprint: bytes, stem: bytes) -> str:
        """Return the mark of a stem, an HMAC. File names of states with this stem end in it, masked (see `mark_of`)."""
        return hmac.digest(self._stems, fingerprint + stem, "sha256").hex()[:STEM_HEX]

    def mark_of(self, name: str) -> str:
        """Return the mark at the end of a whole state's file name, unmasked: what `stem_mark` returns for its stem."""
        return self._masked(name[:NAME_HEX], name[NAME_HEX:])

    def _masked(self, name: str, mark: str) -> str:
        mask = hmac.digest(self._masks, name.encode(), "sha256").hex()[:STEM_HEX]
        return f"{int(mark, 16) ^ int(mask, 16):0{STEM_HEX}x}"


def version_folder(fingerprint: bytes) -> str:
    """Return the name of the folder for all files of one model, one llama.cpp and one set of settings."""
    return fingerprint.hex()[:FOLDER_HEX]


def _derived(master: bytes, label: bytes) -> bytes:
    return hmac.digest(master, b"paddock cache: " + label, "sha256")
