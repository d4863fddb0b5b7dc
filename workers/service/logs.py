"""How a worker logs: JSON lines for whoever collects them, text for a terminal; to stderr. No prompt text, ever."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter


def configure(level: str, log_format: str) -> None:
    """Sends every logger of this process to stderr. `log_format`: auto, text or json; auto is text on a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "text" or (log_format == "auto" and sys.stderr.isatty()):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    else:
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
