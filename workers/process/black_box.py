"""A small file that outlives a worker process and says which requests it was running when it died.

A C++ abort or the kernel's out-of-memory killer leaves a process no time to log. So the engine keeps the ids of its
running requests in a mapped file, and whoever finds the process dead reads it: the supervisor at once, or the next
worker that is given the same file. It holds ids and times, never text of a prompt. While the worker loads its model,
the file says how much is loaded, which the supervisor reads as the process runs.

The file has two halves, and a first byte that says which half is valid. A half is written completely before the byte
changes, so a death at any moment leaves a complete record. One more byte is the progress of loading. Standard library
only, since the supervisor reads it too.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_LABEL = 128
"""Maximum number of characters of an id in the record; a caller's id can be longer and is cut."""

HALF = 1 << 17
_OFFSETS = (16, 16 + HALF)
_SIZE = 16 + 2 * HALF
_MAGIC = b"pdkbox1"
_LOADING = 1 + len(_MAGIC)
"""Place of the byte that says how much of the model is loaded: 1 more than the percentage; 0: it does not load."""
_LENGTH = struct.Struct("<I")
_ROOM = HALF - _LENGTH.size


class BlackBox:
    """The record of the running requests. Only the engine's thread writes it, whenever the set of them changes."""

    def __init__(self, path: Path | None) -> None:
        """Make the record, in a file at `path`; without a path only this process can read it. Raises OSError."""
        self._path = path
        self._running: dict[int, tuple[str, float]] = {}
        self._lines: dict[int, bytes] = {}
        self._half = 0
        self._map: mmap.mmap | None = None
        if path is not None:
            self._map = _mapped(path)

    def loading(self, share: float) -> None:
        """Record that the worker loads its model, and the share (0 to 1) that is done. Never blocks on the disk."""
        if self._map is not None:
            self._map[_LOADING] = 1 + int(100 * min(1.0, max(0.0, share)) + 1e-6)

    def loaded(self) -> None:
        """Record that the worker does not load any more."""
        if self._map is not None:
            self._map[_LOADING] = 0

    def began(self, key: int, label: str) -> None:
        """Record that the request `label` runs from now on. Never blocks on the disk: it only writes to memory."""
        now = time.time()
        label = _printable(label)
        self._running[key] = (label, now)
        self._lines[key] = f"{now:.3f} {label}\n".encode()
        self._write()

    def ended(self, key: int) -> None:
        """Record that the request does not run any more; unknown keys are ignored."""
        if self._lines.pop(key, None) is not None:
            del self._running[key]
            self._write()

    def text(self) -> str:
        """Return text for a log line: which requests run now, and for how long. Can be called on any thread."""
        return describe(list(self._running.values()))

    def close(self) -> None:
        """Remove the file, because the process ends in an orderly way. Calling this again does nothing."""
        if self._map is not None and self._path is not None:
            self._map.close()
            self._map = None
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        if self._map is None:
            return
        data = b"".join(self._lines.values())[:_ROOM]
        half = 1 - self._half
        start = _OFFSETS[half]
        self._map[start : start + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        self._map[0] = self._half = half


def find(path: Path) -> list[tuple[str, float]] | None:
    """Return the requests that a dead process was running, as (id, Unix time of the start); None: no record exists."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE or data[1 : 1 + len(_MAGIC)] != _MAGIC or data[0] > 1:
        return None
    start = _OFFSETS[data[0]]
    (length,) = _LENGTH.unpack_from(data, start)
    lines = data[start + _LENGTH.size : start + _LENGTH.size + min(length, _ROOM)].decode("utf-8", "replace")
    found: list[tuple[str, float]] = []
    for line in lines.splitlines():
        began, _, label = line.partition(" ")
        with contextlib.suppress(ValueError):  # the last line, if the record had no room for all of it
            found.append((label, float(began)))
    return found


def progress_of(path: Path) -> float | None:
    """Return the share of its model that the worker of this file has loaded; None: it does not load, or there is no
    such file."""
    try:
        with path.open("rb") as file:
            head = file.read(_LOADING + 1)
    except OSError:
        return None
    if len(head) <= _LOADING or head[1:_LOADING] != _MAGIC or not 1 <= head[_LOADING] <= 101:
        return None
    return (head[_LOADING] - 1) / 100


def take(path: Path) -> list[tuple[str, float]] | None:
    """Return what `find` returns, and remove the file, so that the requests are reported once: None while it can't be
    removed."""
    found = find(path)
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return None
    return found


class BoxReader:
    """Reads the records that the worker processes of one path leave, each once, even where no file can be removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told: tuple[int, int] | None = None
        """Which file was read last."""

    def take(self) -> list[tuple[str, float]] | None:
        """Return what `find` returns, unless it was returned before, and remove the file."""
        which, found = self._which(), find(self._path)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        if found is None or which == self._told:
            return None
        self._told = which
        return found

    def forget(self) -> None:
        """Remove the file if it was read already: a process that finds it would report it again."""
        if self._told is not None and self._which() == self._told:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _which(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self._path.stat()
            return status.st_ino, status.st_ctime_ns
        return None


def describe(running: Sequence[tuple[str, float]], now: float | None = None) -> str:
    """Return a text such as `requests a (for 3.2 s), b (for 0.1 s)`, longest first; `no request` if nothing runs."""
    now = time.time() if now is None else now
    if not running:
        return "no request"
    by_age = sorted(running, key=lambda item: item[1])
    told = [f"{label} (for {max(0.0, now - began):.1f} s)" for label, began in by_age]
    return f"request{'s' if len(told) > 1 else ''} {', '.join(told)}"


def _printable(label: str) -> str:
    """Return an id in printable form: callers can choose ids, and must not be able to forge a line of the log."""
    kept = "".join(character if character.isprintable() else "?" for character in label[:MAX_LABEL])
    return kept.strip() or "without an id"


def _mapped(path: Path) -> mmap.mmap:
    """Return the mapping of a new file of mode 0600, which replaces any file of a dead process. Raises OSError."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # All of it is written, so that its blocks on the disk are allocated: writing to a mapped page without a block
        # kills the process (SIGBUS) when the disk is full.
        if os.pwrite(descriptor, b"\0" + _MAGIC + bytes(_SIZE - 1 - len(_MAGIC)), 0) < _SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return mmap.mmap(descriptor, _SIZE)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
