"""A file of numbers that is mapped into memory, and written so that a disk in trouble is an error.

A store into a mapped page that its disk can't take ends the process (SIGBUS): where the file has no block, but also
where the file system has become read-only or has failed, since each page is checked again after it was written back.
So the kernel copies into the mapping here, from a file in memory: what it can't store it answers with an error
(EFAULT). That takes 0.4 us more than a store. `pwrite` would take as long, and wait for the disk's journal at times.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

WORD_BYTES = 8


class MappedTable:
    """The file. What is written into it is in the kernel's hands at once, and outlives the process."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        """`max_bytes`: maximum bytes that are written at once. Raises OSError."""
        self._descriptor = descriptor
        self._area = memoryview(b"")
        self._source = _new_source(max_bytes)
        self._staged_bytes = memoryview(mmap.mmap(self._source, max_bytes))
        self._staged = self._staged_bytes.cast("Q")

    def grow(self, num_bytes: int) -> None:
        """Map so many bytes of the file. Raises OSError, ValueError."""
        # With room on disk from the start: a full disk is noticed here, before a call relies on the table.
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        # Earlier mappings show the same file, and live as long as calls use them.
        self._area = memoryview(mmap.mmap(self._descriptor, num_bytes))

    def view(self, word: int) -> tuple[memoryview]:
        """Return the place of a word, for `set_at`."""
        begin = word * WORD_BYTES
        return (self._area[begin : begin + WORD_BYTES],)

    def set_at(self, view: Sequence[memoryview], number: int) -> None:
        """Write a number. Raises OSError."""
        self._staged[0] = number
        os.preadv(self._source, view, 0)

    def set(self, word: int, *numbers: int) -> None:
        """Write numbers one behind the other, from this word on. Raises OSError."""
        for place, number in enumerate(numbers):
            self._staged[place] = number
        self._copy(word * WORD_BYTES, len(numbers) * WORD_BYTES)

    def set_bytes(self, word: int, numbers: Sequence[int], body: bytes) -> None:
        """Write numbers, and bytes behind them. Raises OSError."""
        begin = len(numbers) * WORD_BYTES
        for place, number in enumerate(numbers):
            self._staged[place] = number
        self._staged_bytes[begin : begin + len(body)] = body
        self._copy(word * WORD_BYTES, begin + len(body))

    def _copy(self, begin: int, num_bytes: int) -> None:
        os.preadv(self._source, (self._area[begin : begin + num_bytes],), 0)


def _new_source(num_bytes: int) -> int:
    """Return the descriptor of a file in memory, or of a temporary one where the system has no such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paddock-usage")
    else:
        with tempfile.TemporaryFile(buffering=0) as file:
            descriptor = os.dup(file.fileno())
    os.pwrite(descriptor, bytes(num_bytes), 0)  # written, so that it has its blocks
    return descriptor
