"""What Prometheus answers to the queries of a panel."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

NUM_POINTS = 140
"""Of a line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series; gaps are left out of its points."""

    name: str
    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1] if self.points else math.nan


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus, and the span of time that is shown: unix seconds."""

    url: str
    start: float
    end: float
    rate_s: int
    """Takes the place of `$__rate_interval`."""

    @property
    def step_s(self) -> float:
        return max((self.end - self.start) / NUM_POINTS, 1.0)

    def lines(self, panel: dict[str, Any]) -> list[Line]:
        found = []
        for target in panel["targets"]:
            if target["range"]:
                found += self._over_time(target)
            else:
                found += self._now(target)
        return found

    def _over_time(self, target: dict[str, Any]) -> list[Line]:
        asked = {"query": self._filled(target["expr"]), "start": self.start, "end": self.end, "step": self.step_s}
        return [_line(target, one["metric"], one["values"]) for one in self._ask("query_range", asked)]

    def _now(self, target: dict[str, Any]) -> list[Line]:
        asked = {"query": self._filled(target["expr"]), "time": self.end}
        return [_line(target, one["metric"], [one["value"]]) for one in self._ask("query", asked)]

    def _filled(self, expr: str) -> str:
        """As Grafana would send it, with every variable set to all."""
        span = f"{max(60, int(self.end - self.start))}s"
        expr = expr.replace("$__rate_interval", f"{self.rate_s}s").replace("$__range", span)
        return re.sub(r'"\$\w+"', '".*"', expr)

    def _ask(self, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found


def _line(target: dict[str, Any], labels: dict[str, str], values: list[tuple[float, str]]) -> Line:
    points = [(at, float(value)) for at, value in values]
    name = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"]).strip(" :")
    return Line(name or "-", labels, tuple((at, value) for at, value in points if math.isfinite(value)))
