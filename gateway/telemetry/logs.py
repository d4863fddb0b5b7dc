"""How the gateway logs: text for a terminal, JSON lines for everything else. No prompt text, no keys, ever."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

from gateway.telemetry.trail import Trail

REQUEST_LOGGER = "paddock.request"
PROBED = frozenset({"/health", "/ready", "/metrics", "/metrics/targets"})
"""Asked every few seconds by machines: worth a line at debug level only."""


class TextFormatter(logging.Formatter):
    """One line for people: time, level, message, then the structured fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, "fields", None)
        if not isinstance(fields, dict):
            return line
        return line + "  " + " ".join(f"{name}={value}" for name, value in fields.items())


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


NOISE = ("without completing response", "without completing handshake", "Invalid UTF-8 sequence")
"""A stream that is cut off on purpose lacks its last chunk, and a handshake that is refused its end; uvicorn calls both
errors of the application. The last is a client's fault, and uvicorn's line has a traceback.
"""


class _DropsUvicornNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(words in str(record.msg) for words in NOISE)


def configure(level: str, log_format: str) -> None:
    """Send every logger of this process to stderr. `log_format`: auto, text or json; auto is text on a terminal."""
    text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if text else FieldsFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn tells its life story at info; ours says the same once.
    server = logging.getLogger("uvicorn.error")
    server.setLevel(logging.WARNING)
    server.addFilter(_DropsUvicornNoise())


def log_request(trail: Trail) -> None:
    """The one line of a request that ended."""
    level = logging.DEBUG if trail.path in PROBED else logging.WARNING if trail.status >= 500 else logging.INFO
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra={"fields": trail.line()})
