"""Configures the log of a Paddock process, on stderr: text for a terminal, JSON lines for everything else.

A line's structured fields are given as `extra={"fields": {...}}`. Libraries log warnings and above only: at debug level
some of them log what they send and receive, prompts and keys included.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection

from pythonjsonlogger.json import JsonFormatter

OWN = ("gateway", "workers", "paddock")
"""Loggers that the configured level applies to."""


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


class _Drops(logging.Filter):
    """Drops log lines that contain one of the given texts."""

    def __init__(self, texts: Collection[str]) -> None:
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in self._texts)


def configure(level: str, log_format: str, noise: Collection[str] = ()) -> None:
    """Configure logging for this whole process. `log_format`: auto, text or json; auto is text on a terminal.

    `noise`: the HTTP server's log lines that contain one of these texts report no real error, and are dropped.
    """
    text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if text else FieldsFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    threshold = logging.getLevelName(level.upper())
    root.setLevel(max(threshold, logging.WARNING))
    for name in OWN:
        logging.getLogger(name).setLevel(threshold)
    logging.getLogger("uvicorn.error").addFilter(_Drops(noise))
