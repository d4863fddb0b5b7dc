"""Keeps what a person typed in `paddock chat`, for the next time: in a file that only its owner can read."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

FILE_NAME = "chat-history"
MAX_LINES = 1000


class LineEditor:
    """Python's `readline`, where there is one: `input` gets a line to edit, a history, and pasted text of several lines
    as one turn."""

    def __init__(self, file: Path | None) -> None:
        """`file`: where the history is kept; None: nowhere."""
        self._file = file
        self._readline: ModuleType | None = None
        with suppress(ImportError):
            self._readline = import_module("readline")

    def begin(self) -> str:
        """Prepare `input`, and return why there is no history; empty: there is one, or none was asked for."""
        if self._readline is None:
            return ""
        self._readline.parse_and_bind("set enable-bracketed-paste on")
        if self._file is None:
            return ""
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600))
            self._file.chmod(0o600)
            self._readline.read_history_file(self._file)
        except OSError as error:
            why = f"{self._file} can't be used ({error.strerror}); what is typed is forgotten, or choose --state-dir"
            self._file = None
            return why
        self._readline.set_history_length(MAX_LINES)
        return ""

    def end(self) -> None:
        """Write what was typed."""
        if self._readline is not None and self._file is not None:
            with suppress(OSError):
                self._readline.write_history_file(self._file)
                self._file.chmod(0o600)
