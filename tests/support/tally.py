"""What a fake worker has made, kept where its death can't take it: a line per token, the label of its call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


class Tally:
    """Appends to a file without a buffer, so that what was noted is there after a SIGKILL."""

    def __init__(self, file: str) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, labels: Sequence[str]) -> None:
        """One token of each of these calls, before anybody is told of it."""
        if labels:
            os.write(self._fd, ("\n".join(labels) + "\n").encode())


def read_tally(file: Path) -> Counter[str]:
    """Label of a call -> tokens made for it; empty where nothing was made yet."""
    return Counter(file.read_text().split()) if file.exists() else Counter()
