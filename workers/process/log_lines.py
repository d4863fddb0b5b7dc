"""Configures the log of a Paddock process, on stderr: text for a terminal, JSON lines for everything else.

A line's structured fields are given as `extra={"fields": {...}}`. Libraries log warnings and above only: at debug level
some of them log what they send and receive, prompts and keys included.

A log never makes its process wait. A pipe whose reader stands still, such as a log collector's, or a terminal stopped
by Ctrl-S takes nothing: lines wait in memory then, up to a bound, and those beyond it are counted and left out.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Collection

from pythonjsonlogger.json import JsonFormatter

OWN = ("accounts", "gateway", "workers", "paddock")
"""Loggers that the configured level applies to."""

MAX_WAITING_BYTES = 1 << 20
"""Maximum number of bytes of lines that wait until the log's reader goes on; later lines are left out."""
PIECE_BYTES = select.PIPE_BUF
"""Bytes that a pipe takes without waiting once it says that it can be written to. Source: pipe(7)."""
CLOSE_S = 2.0
"""Maximum seconds to wait at the process's end until the reader has taken the waiting lines."""


class TextFormatter(logging.Formatter):
    """Writes one line for people: time, level, message, then the structured fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, "fields", None)
        if not isinstance(fields, dict):
            return line
        return line + "  " + " ".join(f"{name}={_in_line(value)}" for name, value in fields.items())


def _in_line(value: object) -> str:
    """Return a value for a text line. A caller's text, such as a path, must not start a new line or move the cursor."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class FieldsFormatter(JsonFormatter):
    """Writes one JSON object per line: `time`, `level`, `logger`, `message` and the structured fields, on one level."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        fields = log_data.pop("fields", None)
        return log_data | fields if isinstance(fields, dict) else log_data


class UnblockedHandler(logging.Handler):
    """Writes lines to a file descriptor without blocking: a line that would block is kept until a later line comes."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._own = _opened_again(descriptor)
        self._descriptor = descriptor = descriptor if self._own is None else self._own
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._waiting = deque[bytes]()
        self._num_bytes = self._num_left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - as in logging's own handlers: a line that can't be made ends no call
            self.handleError(record)
            return
        self._write(0.0)
        if self._waiting and self._num_bytes + len(line) > MAX_WAITING_BYTES:
            self._num_left_out += 1
            return
        if self._num_left_out:
            self._keep(self._left_out())
        self._keep(line)
        self._write(0.0)

    def close(self) -> None:
        with self.lock or threading.RLock():
            self._write(CLOSE_S)
            if self._own is not None:
                os.close(self._own)
                self._waiting, self._own, self._descriptor = deque(), None, -1
        super().close()

    def _left_out(self) -> bytes:
        """Return a log line that says how many lines were left out."""
        text = f"the log was not read: {self._num_left_out} lines are left out here"
        self._num_left_out = 0
        record = logging.LogRecord("paddock", logging.WARNING, __file__, 0, text, None, None)
        return f"{self.format(record)}\n".encode()

    def _keep(self, line: bytes) -> None:
        self._waiting += [line[at : at + PIECE_BYTES] for at in range(0, len(line), PIECE_BYTES)]
        self._num_bytes += len(line)

    def _write(self, wait_s: float) -> None:
        """Write the waiting lines, as many as the log's reader takes within `wait_s`."""
        until = time.monotonic() + wait_s
        while self._waiting and self._is_ready(max(0.0, until - time.monotonic())):
            piece = self._waiting.popleft()  # first: a finalizer may log a line in between
            self._num_bytes -= len(piece)
            try:
                rest = piece[os.write(self._descriptor, piece) :]
            except BlockingIOError:  # another process has filled it since
                rest = piece
            except OSError:  # nobody will read it any more
                rest = b""
            if rest:
                self._waiting.appendleft(rest)
                self._num_bytes += len(rest)
            if rest is piece:
                return

    def _is_ready(self, wait_s: float) -> bool:
        """Return whether the log's reader takes a piece, now or within `wait_s`."""
        try:
            return bool(self._poll.poll(wait_s * 1e3))
        except OSError:  # EINVAL: this process may have no open files at all (RLIMIT_NOFILE); the lines wait
            return False


def _opened_again(descriptor: int) -> int | None:
    """Return a non-blocking descriptor of the same terminal or pipe; None if it is neither, or can't be opened again.

    A terminal that has room for a byte says that it can be written to, and then blocks for the rest of the line; a pipe
    may be filled by another process in between. Their own descriptors may be shared with processes that do not expect
    them to be non-blocking."""
    try:
        if os.isatty(descriptor):
            path = os.ttyname(descriptor)
        elif stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            path = f"/proc/self/fd/{descriptor}"
        else:
            return None
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


class _Drops(logging.Filter):
    """Drops log lines that contain one of the given texts."""

    def __init__(self, texts: Collection[str]) -> None:
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in self._texts)


def configure(level: str, log_format: str, noise: Collection[str] = ()) -> None:
    """Configure logging for this whole process. `log_format`: auto, text or json; auto is text on a terminal.

    `noise`: the HTTP server's log lines that contain one of these texts report no real error, and are dropped."""
    text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    handler = _handler()
    handler.setFormatter(TextFormatter() if text else FieldsFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    threshold = logging.getLevelName(level.upper())
    root.setLevel(max(threshold, logging.WARNING))
    for name in OWN:
        logging.getLogger(name).setLevel(threshold)
    logging.getLogger("uvicorn.error").addFilter(_Drops(noise))


def _handler() -> logging.Handler:
    try:
        return UnblockedHandler(sys.stderr.fileno())
    except (OSError, AttributeError, ValueError):  # a program that embeds Paddock has another object there
        return logging.StreamHandler(sys.stderr)
