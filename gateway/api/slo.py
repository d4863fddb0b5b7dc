"""Reads the header `x-slo-ttft-ms`: within how many milliseconds a caller would like the first token."""

from __future__ import annotations

import math
import time

from starlette.types import Scope

from gateway.errors import InvalidRequest

HEADER = b"x-slo-ttft-ms"
MAX_SLO_MS = 24 * 3600 * 1000


def read_begin_by(scope: Scope) -> float:
    """Return the Unix time to begin by; 0 without the header. Raises InvalidRequest unless above 0 and up to a day."""
    for name, value in scope["headers"]:
        if name == HEADER:
            slo_ms = _number(value)
            if not 0 < slo_ms <= MAX_SLO_MS:
                shown = value[:40].decode("ascii", "replace")
                message = f"The header `x-slo-ttft-ms` is {shown!r}. Send milliseconds, above 0 and up to {MAX_SLO_MS}."
                raise InvalidRequest(message, param="x-slo-ttft-ms")
            return time.time() + slo_ms / 1e3
    return 0.0


def _number(value: bytes) -> float:
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number
