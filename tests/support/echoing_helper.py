"""Answers in a helper process, for tests of `workers.process.helper_process`.

    python -m tests.support.echoing_helper

A question is a number of bytes that follow it, a number of bytes to send back after the answer, and what to do: `echo`
them over and over, or `end` after half of them.
"""

from __future__ import annotations

import sys


def main() -> None:
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    for line in sys.stdin.buffer:
        size, wanted, what = line.split()
        data = sys.stdin.buffer.read(int(size)) or b"?"
        answer = (data * (int(wanted) // len(data) + 1))[: int(wanted)]
        out.write(wanted + b"\n" + (answer[: len(answer) // 2] if what == b"end" else answer))
        out.flush()
        if what == b"end":
            return


if __name__ == "__main__":
    main()
