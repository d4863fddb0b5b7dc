"""What a fake worker has made, kept where its death can't take it: a line per token, with its call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


class Tally:
    """Appends to a file without a buffer, so that what was noted is there after a SIGKILL."""

    def __init__(self, file: str) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, runs: Sequence[str]) -> None:
        """One token of each of these, before anybody is told of it. A run: `<label of the call>#<its key>`."""
        if runs:
            os.write(self._fd, ("\n".join(runs) + "\n").encode())


def read_tally(file: Path) -> dict[str, list[int]]:
    """Label of a call -> tokens of each run of it; empty where nothing was made yet."""
    made: dict[str, list[int]] = {}
    for run, tokens in Counter(file.read_text().split() if file.exists() else ()).items():
        made.setdefault(run.rpartition("#")[0], []).append(tokens)
    return made
