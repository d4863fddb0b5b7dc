"""The usage records of one gateway process on disk: files of frames, each deleted once the ledger has all its records.

    <process>-<number of the file's first record>.records

A frame is the length and the checksum of what follows, the serial number of the call in its process, and the record in
MessagePack. The records of a file have numbers in a row. A frame is handed to the kernel by one write, so it survives
the death of the process, though not that of the machine.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SEGMENT_BYTES = 256 << 10
"""Bytes after which a further file is begun."""
NEARLY_FULL = 0.8
"""Share of what may be there from which on the log warns."""
FILE_MODE = 0o600
SUFFIX = ".records"

_HEAD = struct.Struct("<IIQ")
_MARGIN_BYTES = 16 << 10
"""Bytes that a reading takes beyond those asked for: the heads of frames, and the record that no longer fits."""


class JournalFull(Exception):
    """The files have reached their maximum size."""


@dataclass(slots=True)
class Segment:
    """One file."""

    path: Path
    first: int
    """Number of its first record."""
    num_records: int = 0
    num_bytes: int = 0
    """Bytes of whole frames; the file may have more, of a write that failed."""

    @property
    def last(self) -> int:
        return self.first + self.num_records - 1


class Segments:
    """The files of one process. `append` and `read` block for as long as the disk does."""

    def __init__(self, folder: Path, process: str, max_bytes: int) -> None:
        self._folder = folder
        self._process = process
        self._max_bytes = max_bytes
        self.num_bytes_beside = 0
        """Bytes that count with those of these files: those of dead processes that this one has taken over."""
        self._segments: list[Segment] = []
        self._descriptor: int | None = None
        """The last file, open for appending; None: the next record begins a file."""
        self._position = (0, 0, 0)
        """Where the last `read` ended: the number of the last record read, the first of its file, the bytes before."""
        self.num_bytes = 0

    @property
    def last(self) -> int:
        """The number of the last record on disk; 0: there is none."""
        return self._segments[-1].last if self._segments else 0

    @property
    def is_full(self) -> bool:
        return self.num_bytes + self.num_bytes_beside >= self._max_bytes

    @property
    def is_nearly_full(self) -> bool:
        return self.num_bytes + self.num_bytes_beside >= NEARLY_FULL * self._max_bytes

    def load(self) -> set[int]:
        """Find the files that the process left. Return the serial numbers of the calls with a record."""
        serials: set[int] = set()
        for path in self._folder.glob(f"{self._process}-*{SUFFIX}"):
            first = path.name.removesuffix(SUFFIX).rpartition("-")[2]
            if not first.isdecimal():
                continue
            segment = Segment(path, int(first))
            for serial, _, end in frames(path.read_bytes()):
                serials.add(serial)
                segment.num_records += 1
                segment.num_bytes = end
            if segment.num_records:
                self._segments.append(segment)
        self._segments.sort(key=lambda segment: segment.first)
        self.num_bytes = sum(segment.num_bytes for segment in self._segments)
        return serials

    def append(self, number: int, serial: int, record: bytes) -> None:
        """Write a record. Raises JournalFull; OSError, after which the files are as before."""
        if self.is_full:
            raise JournalFull
        segment = self._segments[-1] if self._segments else None
        if (
            segment is None
            or self._descriptor is None
            or segment.last + 1 != number
            or segment.num_bytes >= SEGMENT_BYTES
        ):
            segment, self._descriptor = self._begin(number)
        frame = encode_frame(serial, record)
        try:
            if os.write(self._descriptor, frame) < len(frame):
                raise OSError(None, "the record was written in part")
        except OSError:
            # What was written of it must not stand before the next frame; if it can't go, that begins a new file.
            self._close()
            with suppress(OSError):
                os.truncate(segment.path, segment.num_bytes)
            if not segment.num_records:
                self._drop(segment)
            raise
        segment.num_records += 1
        segment.num_bytes += len(frame)
        self.num_bytes += len(frame)

    def read(self, after: int, max_records: int, max_bytes: int) -> list[bytes]:
        """Return records that follow number `after`, with numbers in a row. Raises OSError."""
        segment = next((segment for segment in self._segments if segment.last > after), None)
        if segment is None:
            return []
        number, first, start = self._position
        wanted = max_bytes + _MARGIN_BYTES
        if (number, first) != (after, segment.first):
            number, start, wanted = segment.first - 1, 0, segment.num_bytes
        with segment.path.open("rb") as file:
            file.seek(start)
            body = file.read(min(segment.num_bytes - start, wanted))
        records: list[bytes] = []
        num_bytes = 0
        for _, record, end in frames(body):
            number += 1
            if number > after:
                num_bytes += len(record)
                if records and (len(records) >= max_records or num_bytes > max_bytes):
                    break
                records.append(record)
            self._position = (number, segment.first, start + end)
        return records

    def begins_after(self, number: int) -> int | None:
        """Return the first number of the first file whose records all follow number `number + 1`; None: none does."""
        return next((segment.first for segment in self._segments if segment.first > number + 1), None)

    def forget(self, number: int) -> None:
        """Delete the files whose last record has at most this number."""
        while self._segments and self._segments[0].last <= number:
            if len(self._segments) == 1:
                self._close()
            self._drop(self._segments[0])

    def _begin(self, number: int) -> tuple[Segment, int]:
        self._close()
        path = self._folder / f"{self._process}-{number}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, FILE_MODE)
        segment = Segment(path, number)
        self._segments.append(segment)
        return segment, descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _drop(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self.num_bytes -= segment.num_bytes
        with suppress(OSError):  # the ledger has its records, and counts none of them twice
            segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._close()


def encode_frame(serial: int, record: bytes) -> bytes:
    """Return the frame of a record."""
    body = _HEAD.pack(len(record), 0, serial)[8:] + record
    return _HEAD.pack(len(record), zlib.crc32(body), serial) + record


def frames(body: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield the serial number and the record of each frame, and where it ends; up to the first that is not whole."""
    start = 0
    while start + _HEAD.size <= len(body):
        length, checksum, serial = _HEAD.unpack_from(body, start)
        end = start + _HEAD.size + length
        if end > len(body) or zlib.crc32(body[start + 8 : end]) != checksum:
            return
        yield serial, body[start + _HEAD.size : end], end
        start = end
