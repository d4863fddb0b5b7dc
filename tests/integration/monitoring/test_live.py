"""Real load on a real Paddock, seen by a real Prometheus: every query of every board finds something; alerts arrive."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest

import preview_board
from preview.source import Source
from tests.integration.monitoring.watched import ASLEEP, MODEL, TEAMS, Watched, watched
from tests.support.teams_at_work import TeamsAtWork, ask
from tests.support.waiting import until

BOARDS = Path(__file__).resolve().parents[3] / "helm" / "files" / "dashboards"
SHOWN_S = 60.0
"""Within which all boards show everything; some seconds where nobody else uses the machine."""
FIRES_S = 30.0
VARIABLES = {"$__rate_interval": "15s", "$__range": "1m", "$model": ".*", "$team": ".*"}
NO_WORKER, NO_GATEWAY = "PaddockNoWorker", "PaddockGatewaysDown"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("watched")) as running:
        yield running


WITHOUT_SUPERVISOR = {"paddock_workers_wanted"}
"""Metrics that only a supervisor which loads models on demand has something to say of; there is none here."""


def queries() -> dict[str, str]:
    """Board, panel and query -> its expression, as Grafana would send it."""
    found = {}
    for file in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = str(target["expr"])
                for name, value in VARIABLES.items():
                    expr = expr.replace(name, value)
                if not any(name in expr for name in WITHOUT_SUPERVISOR):
                    found[f"{file.stem} {panel['id']}{target['refId']}: {panel['title']}"] = expr
    return found


def has_value(series: list[dict[str, Any]]) -> bool:
    return any(not math.isnan(float(one["value"][1])) for one in series)


async def test_every_panel_shows_something(scene: Watched) -> None:
    empty = queries()
    assert len(empty) > 100
    assert not any("$" in expr for expr in empty.values())

    def all_shown() -> bool:
        for name, expr in list(empty.items()):
            if has_value(scene.prometheus.query(expr)):
                del empty[name]
        return not empty

    with TeamsAtWork(scene.urls, MODEL, TEAMS) as load:
        try:
            await until(all_shown, SHOWN_S, "something in every panel")
        finally:
            assert not empty, f"{load.told}: nothing in {sorted(empty)}"


async def test_the_workers_are_found(scene: Watched) -> None:
    found = scene.prometheus.get("targets")["activeTargets"]
    seen = {(target["scrapePool"], target["labels"].get("worker"), target["health"]) for target in found}
    workers = {("paddock-worker", f"worker-{number}", "up") for number in range(len(scene.stack.workers))}
    others = {(name, None, "up") for name in ("paddock-gateway", "paddock-accounts", "prometheus")}
    assert seen == workers | others


async def test_boards_are_drawn(scene: Watched, tmp_path: Path) -> None:
    now = time.time()
    source = Source(scene.prometheus.url, now - 60, now, rate_s=15)
    for file in sorted(BOARDS.glob("*.json")):
        drawn = preview_board.draw(file.stem, source, tmp_path).read_text()
        panels = [panel for panel in json.loads(file.read_text())["panels"] if panel["type"] != "text"]
        assert all(f">{escape(panel['title'])}<" in drawn for panel in panels)
        kinds = {panel["type"] for panel in panels}
        for kind, mark in (
            ("timeseries", "<polyline"),
            ("stat", 'class="figure"'),
            ("table", "<td>"),
            ("heatmap", "<rect"),
        ):
            assert (mark in drawn) >= (kind in kinds), (file.stem, kind)


async def test_alerts_arrive(scene: Watched) -> None:
    told = scene.prometheus.alerts
    assert not told().keys() & {NO_WORKER, NO_GATEWAY}
    body = {"model": ASLEEP, "prompt": "Is anybody there?"}
    caller = threading.Thread(target=ask, args=(scene.urls[0], "/v1/completions", body, TEAMS[0].key))
    caller.start()
    await until(lambda: NO_WORKER in told(), FIRES_S, f"{NO_WORKER} fires")
    assert told()[NO_WORKER]["labels"] == {"alertname": NO_WORKER, "model": ASLEEP, "severity": "page"}
    assert told()[NO_WORKER]["annotations"]["summary"] == f"{ASLEEP}: up to 1 calls wait, and no worker takes them"
    assert NO_GATEWAY not in told()
    for gateway in scene.stack.gateways:
        gateway.kill()
    caller.join()
    await until(lambda: NO_GATEWAY in told(), FIRES_S, f"{NO_GATEWAY} fires")
