"""Takes the lines that child processes write: all go to a bounded log file per child, notable ones to the terminal too.

A write to a terminal that is stopped (Ctrl-S), or to a pipe whose reader has stopped reading, blocks. The process that
reads its children's output must not block, since the children would block in turn. So a thread writes to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any

LOG_BYTES = 8 << 20
LOG_BACKUPS = 2
RECENT_LINES = 20
"""Number of a child's last lines that are kept: enough for an abort's reason and the stack that follows it."""
LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "critical": 50}
OWN_PREFIX = "paddock: "
"""The beginning of the line in which every program of Paddock says why it ends."""

OWN_KEYS = frozenset(
    {"level", "levelname", "message", "msg", "timestamp", "time", "asctime", "logger", "name", "taskName"}
)


class Console:
    """Chooses the lines that are shown on the terminal."""

    def __init__(self, threshold: str, say: Callable[[str], None], *, raw: bool = False) -> None:
        """`threshold`: level below which children's lines go to their log files only. `say` shows a line, and must not
        wait for the terminal. `raw`: show JSON lines as they are."""
        self.held = False
        """Whether all of the children's lines go to their log files only."""
        self.say = say
        self._threshold = LEVELS[threshold]
        self._raw = raw

    def child_line(self, name: str, line: str) -> None:
        record = record_of(line)
        level = level_of(record)
        if level >= self._threshold and not self.held:
            self.say(line if self._raw and record else f"{name} | {readable(record) if record else line}")


class Output:
    """Passes one child's lines to its log file and the console. Only writing to the file can block."""

    def __init__(self, name: str, folder: Path, console: Console) -> None:
        self.name = name
        self.path = folder / f"{name}.log"
        self._console = console
        self._recent: deque[str] = deque(maxlen=RECENT_LINES)
        self._file = _LogFile(self.path, maxBytes=LOG_BYTES, backupCount=LOG_BACKUPS, delay=True, encoding="utf-8")
        self._file.on_loss = self._lost
        self._file.terminator = "\n"

    def line(self, raw: bytes) -> None:
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        self._file.emit(logging.makeLogRecord({"msg": text}))
        if text:
            self._recent.append(text)
            self._console.child_line(self.name, text)

    def recent(self) -> list[str]:
        """Return the child's last lines in readable form, for the report of its death."""
        return [readable(record) if (record := record_of(line)) else line for line in self._recent]

    def complaint(self) -> str:
        """Return why the child ended: its last line with `OWN_PREFIX`, else its last error, else its last line."""
        told = [line for line in self._recent if line.startswith(OWN_PREFIX)]
        if told:
            return told[-1].removeprefix(OWN_PREFIX)
        errors = [record for line in self._recent if level_of(record := record_of(line)) >= LEVELS["error"]]
        if errors:
            return str(errors[-1].get("message") or errors[-1].get("msg") or "")
        return self._recent[-1] if self._recent else "it said nothing"

    def note(self, text: str) -> None:
        """Write the supervisor's own line about this child to the terminal and into the child's file."""
        self._file.emit(logging.makeLogRecord({"msg": text}))
        self._console.say(text)

    def close(self) -> None:
        # Lines that the disk has not taken are written once more here, which may fail once more.
        with contextlib.suppress(OSError):
            self._file.close()

    def _lost(self, error: BaseException | None) -> None:
        self._console.say(f"paddock: {self.path} takes no more lines ({error}); {self.name} goes on")


class _LogFile(RotatingFileHandler):
    """A log file that loses lines, and does no other harm, when the disk takes no more."""

    on_loss: Callable[[BaseException | None], None] | None = None
    """Called with the error when a line is lost, unless the line before it was lost, too."""
    _fails = _loses = False

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        super().emit(record)
        self._loses = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        self._fails = True
        if not self._loses and self.on_loss is not None:
            self.on_loss(sys.exc_info()[1])


def record_of(line: str) -> dict[str, Any]:
    """Return a child's line as the record of a log; empty if it is none."""
    if not line.startswith("{"):
        return {}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not trusted: a child's line may be nested deeper than any log line
        return {}
    return record if isinstance(record, dict) else {}


def level_of(record: dict[str, Any]) -> int:
    """Return the level of a record, as Python's `logging` numbers it."""
    # Lines that are no log lines (llama.cpp's, a traceback) count as `info`; when the child dies they are shown anyway.
    return LEVELS.get(str(record.get("level") or record.get("levelname") or "info").lower(), 20)


def readable(record: dict[str, Any]) -> str:
    """Return a record as a line for people, with a traceback below it."""
    level = str(record.get("level") or record.get("levelname") or "info").upper()
    message = str(record.get("message") or record.get("msg") or "")
    trace = record.get("exc_info") or ""
    rest = " ".join(
        f"{k}={v}" for k, v in record.items() if k not in OWN_KEYS and k != "exc_info" and v not in (None, "")
    )
    return f"{level} {message}{f' ({rest})' if rest else ''}" + (f"\n{trace}" if trace else "")


MAX_WAITING = 4 << 20
"""Maximum number of bytes that wait for the terminal; lines beyond it are left out, and their number is shown later."""
CLOSE_S = 2.0
"""Maximum seconds to wait at the end until the terminal has taken the waiting lines."""
STDOUT, STDERR = 1, 2


class Terminal:
    """Writes lines to standard output and error, in order, on a thread. `__exit__` waits for it at most `CLOSE_S`."""

    def __init__(self, stdout: int = STDOUT, stderr: int = STDERR) -> None:
        """`stdout`, `stderr`: file descriptors."""
        self._stdout, self._stderr = stdout, stderr
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_bytes = self._num_lost = 0
        self._is_over = False
        self._changed = threading.Condition()
        # A daemon thread: the program's end must not wait for it, since it may be in a write that never ends.
        self._writer = threading.Thread(target=self._write, name="terminal", daemon=True)

    def __enter__(self) -> Terminal:
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._writer.join(CLOSE_S)

    def say(self, line: str) -> None:
        """Have the thread write a line to standard error; do not wait for it."""
        self._put(self._stderr, line)

    def show(self, line: str) -> None:
        """Have the thread write a line to standard output; do not wait for it."""
        self._put(self._stdout, line)

    def _put(self, descriptor: int, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "replace")
        with self._changed:
            if self._num_bytes + len(data) > MAX_WAITING:
                self._num_lost += 1
                return
            if self._num_lost:
                told = f"paddock: the terminal took no more; {self._num_lost} lines are left out here\n".encode()
                self._num_lost = 0
                self._keep(self._stderr, told)
            self._keep(descriptor, data)
            self._changed.notify_all()

    def _keep(self, descriptor: int, data: bytes) -> None:
        self._waiting.append((descriptor, data))
        self._num_bytes += len(data)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                descriptor, data = self._waiting[0]
            # An error of a closed terminal must not prevent the orderly stop of the processes.
            with contextlib.suppress(OSError):
                _write_whole(descriptor, data)
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(data)


def _write_whole(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process that has the terminal open has made it non-blocking
            time.sleep(0.01)
