"""Opens standard input, output and error on the null device where a process was started without them."""

from __future__ import annotations

import os
import sys

STDIN, STDOUT, STDERR = 0, 1, 2


def complete() -> None:
    """Open the null device on each closed descriptor of 0, 1 and 2, and set those of `sys.stdin`, `sys.stdout` and
    `sys.stderr` that are None. Call it before anything else opens a descriptor. Raises OSError.

    A socket or file that is opened later would get the free number. What is written to standard output or error would
    go into it, and a child process to which it is handed down gets its own input or output there instead."""
    for number in (STDIN, STDOUT, STDERR):
        if not _is_open(number):
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number, and all below `number` are open
            os.set_inheritable(descriptor, True)
    # Python's own are None where it found the descriptor closed.
    if sys.stdin is None:
        sys.stdin = open(STDIN, encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end
    if sys.stdout is None:
        sys.stdout = open(STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
