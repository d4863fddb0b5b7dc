"""A board: rows of panels on a grid of 24 columns, variables, links to the other boards and to the runbook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from boards.panel import Panel, Row
from boards.promql import OF_MODEL, WINDOW
from boards.shapes import DATASOURCE, Json, panel_json, row_json

SCHEMA_VERSION = 39
"""Grafana 11.0's. Later ones migrate it when they load it."""
COLUMNS = 24
TAG = "paddock"


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a board: values of `label` in `series`."""

    name: str
    series: str


MODEL = Variable("model", "paddock_workers")
TEAM = Variable("team", "paddock_requests_total")


@dataclass(frozen=True, slots=True)
class Board:
    """One board. `name`: its file's; Grafana knows it as `paddock-NAME`."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = (MODEL,)
    span: str = "1h"
    """How far back it shows when it is opened."""

    @property
    def uid(self) -> str:
        return f"{TAG}-{self.name}"

    def text(self) -> str:
        """Its file."""
        return json.dumps(self.json(), indent=1, sort_keys=True) + "\n"

    def json(self) -> Json:
        return {
            "annotations": {"list": [_restarts()]},
            "description": self.description,
            "editable": True,
            "fiscalYearStartMonth": 0,
            "graphTooltip": 1,
            "id": None,
            "links": _links(),
            "panels": list(_placed(self.rows)),
            "refresh": "30s",
            "schemaVersion": SCHEMA_VERSION,
            "tags": [TAG],
            "templating": {"list": [_datasource(), *(_choice(variable) for variable in self.variables)]},
            "time": {"from": f"now-{self.span}", "to": "now"},
            "timepicker": {},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
            "version": 1,
            "weekStart": "",
        }


def _placed(rows: tuple[Row, ...]) -> Iterator[Json]:
    """Panels from left to right, a new line where one does not fit; every panel of a line is as high as the highest."""
    number, y = 1, 0
    for row in rows:
        yield row_json(row.title, number, y)
        number, y = number + 1, y + 1
        for line in _lines(row.panels):
            x = 0
            for panel in line:
                yield panel_json(panel, number, x, y)
                number, x = number + 1, x + panel.width
            y += max(panel.height for panel in line)


def _lines(panels: tuple[Panel, ...]) -> Iterator[list[Panel]]:
    line: list[Panel] = []
    for panel in panels:
        if sum(one.width for one in line) + panel.width > COLUMNS:
            yield line
            line = []
        line.append(panel)
    if line:
        yield line


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }


def _choice(variable: Variable) -> Json:
    values = f"label_values({variable.series}, {variable.name})"
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": values,
        "query": {"qryType": 1, "query": values, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
    }


def _links() -> list[Json]:
    """To all boards that have the tag, the runbook among them."""
    return [
        {
            "title": "Paddock",
            "type": "dashboards",
            "tags": [TAG],
            "icon": "external link",
            "tooltip": "The other boards, and the runbook",
            "url": "",
            "asDropdown": False,
            "targetBlank": False,
            "includeVars": True,
            "keepTime": True,
        }
    ]


def _restarts() -> Json:
    return {
        "name": "Worker processes lost",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": f'max by (model) (increase(paddock_worker_losses_total{{how="lost", {OF_MODEL}}}[{WINDOW}])) > 0',
        "step": "60s",
        "titleFormat": "worker lost",
        "textFormat": "{{model}}",
    }
