"""Opens model files without waiting for anybody: a pipe, device or socket in the place of a file is refused.

Opening a pipe waits until somebody opens its other end, and reading a device may never end, so that a name in a
catalog, or a file that was exchanged since, would stop a supervisor or a worker for good.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFile(OSError):
    """The path leads to something that is no regular file; `strerror` says what it is."""


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered, and never wait. Raises NotAFile, IsADirectoryError, OSError."""
    _check(os.stat(path).st_mode, path)  # opening a device can have effects of its own
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor).st_mode, path)  # it may be another one by now
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> None:
    """Raise NotAFile or IsADirectoryError if a path leads to something that is no regular file, OSError if to
    nothing."""
    _check(os.stat(path).st_mode, path)


def _check(mode: int, path: Path) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    what = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise NotAFile(errno.EINVAL, f"it is {what}, not a file", str(path))
