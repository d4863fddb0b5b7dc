"""Holds the files of a sleeping model in main memory, so that the model loads again without the disk.

    python -m workers.supervisor.loading.keeper FILE...

It maps the files and locks their pages (mlock(2)), as far as RLIMIT_MEMLOCK allows. Pages that it can't lock it reads
now and again, so that the kernel keeps them for others' sake last. Once all are in memory it writes the number of bytes
that are locked as a line. It ends when its standard input ends, when it is killed, and with its parent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.process import parent_death

TOUCH_EVERY_S = 30.0
"""Seconds between two readings of the pages that are not locked."""
FIRST_TO_BE_KILLED = "1000"
"""Score by which the kernel ends this process first where memory is short (proc(5), oom_score_adj)."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A file in memory."""

    address: int
    size: int
    is_locked: bool

    def touch(self) -> None:
        """Read a byte of each page."""
        pages = memoryview((ctypes.c_ubyte * self.size).from_address(self.address)).cast("B")
        bytes(pages[:: mmap.PAGESIZE])


def _library() -> ctypes.CDLL:
    """Return the C library with the types of what is called."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def hold(file: Path) -> _Mapped | None:
    """Map a file and have all of its pages in memory; None: it is empty. Blocks while they are read. Raises OSError."""
    library, descriptor = _library(), os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return None
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{file} can't be mapped")
    mapped = _Mapped(address, size, is_locked=library.mlock(address, size) == 0)
    if not mapped.is_locked:
        mapped.touch()
    return mapped


def prepare() -> None:
    """Allow this process to lock as much as it may, and have the kernel end it before others."""
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_BE_KILLED, encoding="ascii")


def main(files: Sequence[str]) -> int:
    """Hold the files until standard input ends. Return the exit code."""
    parent_death.hold()
    prepare()
    try:
        held = [mapped for file in files if (mapped := hold(Path(file))) is not None]
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(sum(mapped.size for mapped in held if mapped.is_locked), flush=True)
    loose = [mapped for mapped in held if not mapped.is_locked]
    while not select.select([sys.stdin], [], [], TOUCH_EVERY_S if loose else None)[0]:
        for mapped in loose:
            mapped.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
