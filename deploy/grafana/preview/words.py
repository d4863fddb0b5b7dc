"""Numbers with Grafana's units, short enough for an axis."""

from __future__ import annotations

import math

TIMES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))
COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
AFTER = {"reqps": " req/s", "ops": " ops/s", "suffix: tok/s": " tok/s"}


def words(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return _scaled(value, TIMES, " s", " ")
    if unit == "bytes":
        return _scaled(value, BYTES, " B", " ")
    return _scaled(value, COUNTS, "", "") + AFTER.get(unit, "")


def _scaled(value: float, scales: tuple[tuple[float, str], ...], plain: str, space: str) -> str:
    for size, name in scales:
        if abs(value) >= size:
            return f"{value / size:.3g}{space}{name}"
    return f"{value:.3g}{plain}" if value else f"0{plain}"
