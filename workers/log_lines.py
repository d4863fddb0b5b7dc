"""How a process of Paddock logs: text for a terminal, JSON lines for everything else, to stderr.

A line carries its facts in `extra={"fields": {...}}`. Libraries speak from warnings on only: at debug level some of
them write what they send and receive, prompts and keys included.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection

from pythonjsonlogger.json import JsonFormatter

OWN = ("gateway", "workers", "paddock")
"""Loggers that the level is for."""


class TextFormatter(logging.Formatter):
    """One line for people: time, level, message, then the structured fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, "fields", None)
        if not isinstance(fields, dict):
            return line
        return line + "  " + " ".join(f"{name}={_in_line(value)}" for name, value in fields.items())


def _in_line(value: object) -> str:
    """A caller's text, such as a path, begins no line of its own and moves no cursor."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class FieldsFormatter(JsonFormatter):
    """One JSON object per line; the structured fields stand beside `time`, `level`, `logger` and `message`."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        fields = log_data.pop("fields", None)
        return log_data | fields if isinstance(fields, dict) else log_data


class _Drops(logging.Filter):
    """Lines of a library that have one of these texts in them."""

    def __init__(self, texts: Collection[str]) -> None:
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in self._texts)


def configure(level: str, log_format: str, noise: Collection[str] = ()) -> None:
    """For this whole process. `log_format`: auto, text or json; auto is text on a terminal.

    `noise`: texts of lines that the HTTP server calls errors and that are none.
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
