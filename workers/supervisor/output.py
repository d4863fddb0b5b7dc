"""Keeps the lines that the children write: all in a bounded log file each, the notable ones on the terminal too.

A terminal that is stopped (Ctrl-S), or a pipe whose reader has stopped reading, takes no more bytes, and a write to it
waits. A process that reads what its children write must not wait, since the children would wait for it: a thread writes
to the terminal.
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
"""Last lines kept of a child: enough for the reason of an abort before the stack that follows it."""
LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "critical": 50}
OWN_PREFIX = "paddock: "
"""Begins the line by which every program of Paddock says why it ends."""

OWN_KEYS = frozenset(
    {"level", "levelname", "message", "msg", "timestamp", "time", "asctime", "logger", "name", "taskName"}
)


class Console:
    """Chooses the lines that a person sees. Lines of children below `threshold` stay in their files; `raw` passes JSON
    lines on as they are.
    """

    def __init__(self, threshold: str, say: Callable[[str], None], *, raw: bool = False) -> None:
        """`say` shows a line; it does not wait for the terminal (`workers.supervisor.output`)."""
        self.held = False
        """Whether children's lines go to their files only."""
        self.say = say
        self._threshold = LEVELS[threshold]
        self._raw = raw

    def child_line(self, name: str, line: str) -> None:
        record = _record(line)
        level = _level(record)
        if level >= self._threshold and not self.held:
            self.say(line if self._raw and record else f"{name} | {_readable(record) if record else line}")


class Output:
    """Takes one child's lines. Blocks only for writing to a local file."""

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
        """Return the last lines, readable, for the report of a child's death."""
        return [_readable(record) if (record := _record(line)) else line for line in self._recent]

    def complaint(self) -> str:
        """Return the child's last error line, else its last line."""
        told = [line for line in self._recent if line.startswith(OWN_PREFIX)]
        if told:
            return told[-1].removeprefix(OWN_PREFIX)
        errors = [record for line in self._recent if _level(record := _record(line)) >= LEVELS["error"]]
        if errors:
            return str(errors[-1].get("message") or errors[-1].get("msg") or "")
        return self._recent[-1] if self._recent else "it said nothing"

    def note(self, text: str) -> None:
        """Write the supervisor's own line about this child to the terminal and into the child's file."""
        self._file.emit(logging.makeLogRecord({"msg": text}))
        self._console.say(text)

    def close(self) -> None:
        # What the disk has not taken is written once more here, and may fail once more.
        with contextlib.suppress(OSError):
            self._file.close()

    def _lost(self, error: BaseException | None) -> None:
        self._console.say(f"paddock: {self.path} takes no more lines ({error}); {self.name} goes on")


class _LogFile(RotatingFileHandler):
    """A log file that loses lines, and does no other harm, where the disk takes no more."""

    on_loss: Callable[[BaseException | None], None] | None = None
    """Called with the error of the first line that is lost, and again of the first after a line that was written."""
    _fails = _loses = False

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        super().emit(record)
        self._loses = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        self._fails = True
        if not self._loses and self.on_loss is not None:
            self.on_loss(sys.exc_info()[1])


def _record(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # nested deeper than any log line: what a child writes is not trusted
        return {}
    return record if isinstance(record, dict) else {}


def _level(record: dict[str, Any]) -> int:
    # What is not a log line (llama.cpp's own, a traceback) counts as information: a death prints it anyway.
    return LEVELS.get(str(record.get("level") or record.get("levelname") or "info").lower(), 20)


def _readable(record: dict[str, Any]) -> str:
    level = str(record.get("level") or record.get("levelname") or "info").upper()
    message = str(record.get("message") or record.get("msg") or "")
    trace = record.get("exc_info") or ""
    rest = " ".join(
        f"{k}={v}" for k, v in record.items() if k not in OWN_KEYS and k != "exc_info" and v not in (None, "")
    )
    return f"{level} {message}{f' ({rest})' if rest else ''}" + (f"\n{trace}" if trace else "")


MAX_WAITING = 4 << 20
"""Most bytes that wait for the terminal; lines beyond that are left out, and counted."""
CLOSE_S = 2.0
"""Seconds that the terminal has at the end to take what waits."""
STDOUT, STDERR = 1, 2


class Terminal:
    """Standard output and standard error, written by a thread. Lines put in before `__exit__` are shown in order."""

    def __init__(self, stdout: int = STDOUT, stderr: int = STDERR) -> None:
        """`stdout`, `stderr`: file descriptors."""
        self._stdout, self._stderr = stdout, stderr
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_bytes = self._num_lost = 0
        self._is_over = False
        self._changed = threading.Condition()
        # A daemon, so that the program's end does not wait for it: it may be in a write that never ends.
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
        """Write a line to standard error, as soon as that takes it, without waiting."""
        self._put(self._stderr, line)

    def show(self, line: str) -> None:
        """Write a line to standard output, as soon as that takes it, without waiting."""
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
            # A terminal that was closed must not keep the processes from being stopped in order.
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
        except BlockingIOError:  # another process that has the terminal open may have made it non-blocking
            time.sleep(0.01)
