"""What the C library does with large blocks of memory that are free again.

glibc raises its threshold for blocks that it maps one by one each time such a block is freed, up to 32 MiB. What is
below lies in a thread's arena, where it is kept: the arena of a worker that had moved states of all sizes for half an
hour held 67 MB, of which 37 were free. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 4 << 20
"""States, and buffers of a context. Far above the logits of a step, which must not cost a system call each."""


def give_large_blocks_back() -> bool:
    """From now on freed blocks of `LARGE_BYTES` and more go back to the system at once; False: not with this C library.

    For the whole process, once, before its threads begin.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    mallopt = library.mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))
