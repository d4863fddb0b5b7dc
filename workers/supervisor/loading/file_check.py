"""Finds out whether a worker died of its model's files: one that was cut short while it was mapped ends the process.

The headers are read in a process of their own, as llama.cpp's rooms are loaded there, and as reading a file that others
still cut may end that process, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from workers.footprint.learned import files_of
from workers.models.spec import ModelSpec
from workers.process.helper_process import NotStarted, launched

WALL_S = 10.0
MOST_CHARS = 500


def fault_of(model: ModelSpec, code: int) -> str:
    """Return what is wrong with the files of a worker that ended with this exit code, by their own headers; empty:
    nothing, or it did not end over a page of a file. Blocks for a second."""
    if code != -signal.SIGBUS:
        return ""
    command = [sys.executable, "-m", "workers.llama.gguf", *map(str, files_of(model))]
    try:
        with launched(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            try:
                told, _ = process.communicate(timeout=WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return ""
    except (NotStarted, OSError):
        return ""
    return told.decode("utf-8", "replace").strip()[:MOST_CHARS]
