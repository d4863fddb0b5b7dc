"""The boards' files are what their values write, Grafana can read them, and they name only what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

import write_boards
from gateway.commands.config import accounts_groups, gateway_groups, metrics_of, worker_groups
from gateway.settings import UpSettings
from gateway.telemetry.outcomes import FAILED_BY
from tests.integration.monitoring.promql_names import grouped_labels, matched_labels, series_in
from workers.models.spec import LlamaSettings, ModelSpec
from workers.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "helm" / "files" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "helm" / "files" / "rules").glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(json.loads(Path(__file__).with_name("board.schema.json").read_text()))
METRICS = metrics_of((*gateway_groups(), *worker_groups(), *accounts_groups()))
LABELS = {name: {"le", *metric.labels} for metric in METRICS for name in metric.series}
OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}
OF_TARGETS = {"job", "instance", "model", "worker"}
"""What Prometheus knows of a process that it scrapes; `model` and `worker` of workers only."""
OTHERS_NAMES = {
    "container_cpu_cfs_throttled_periods_total",
    "id_slot",
    "left_out",
    "max_tokens",
    "previous_response_id",
}
"""Words of the runbook that are fields of requests and answers, or another exporter's."""
UNITS = {"short", "none", "s", "percentunit", "bytes", "ops", "reqps", "suffix: tok/s"}


def rules() -> list[dict[str, Any]]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] not in ("row", "text")]


def expressions() -> Iterator[tuple[str, str]]:
    for file in FILES:
        board = json.loads(file.read_text())
        for annotation in board["annotations"]["list"]:
            yield f"{file.stem}: {annotation['name']}", annotation["expr"]
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]
    for rule in rules():
        yield rule.get("alert") or rule["record"], str(rule["expr"])


def test_the_files_are_what_the_values_write() -> None:
    assert {file.stem for file in FILES} == {board.name for board in write_boards.boards()}
    for board in write_boards.boards():
        assert (write_boards.FOLDER / f"{board.name}.json").read_text() == board.text(), write_boards.REMEDY


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_grafana_can_read_it(file: Path) -> None:
    board = json.loads(file.read_text())
    VALIDATOR.validate(board)
    assert board["uid"] == f"paddock-{file.stem}"
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize(
    "misspelt", ["uidd", "panels.1.descriptoin", "panels.1.options.colourMode", "panels.1.targets.0.exp"]
)
def test_a_misspelt_field_is_seen(misspelt: str) -> None:
    board = json.loads(FILES[0].with_stem("overview").read_text())
    *way, name = misspelt.split(".")
    inside = board
    for step in way:
        inside = inside[int(step) if step.isdigit() else step]
    inside[name] = "x"
    assert not VALIDATOR.is_valid(board)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_panel_is_explained(file: Path) -> None:
    board = json.loads(file.read_text())
    variables = {variable["name"] for variable in board["templating"]["list"]}
    for panel in panels(board):
        assert re.fullmatch(r"[A-Z0-9`1].*[.]", panel["description"], re.DOTALL), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        steps = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert steps[0] is None
        assert steps[1:] == sorted(steps[1:])
        for target in panel["targets"]:
            assert target["legendFormat"] != "__auto", panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"}
            assert used <= variables, panel["title"]


def test_every_series_is_there() -> None:
    known = LABELS.keys() | RECORDED | OF_PROMETHEUS.keys()
    for where, expr in expressions():
        assert series_in(expr) <= known, where
        assert series_in(expr) or expr.startswith("vector("), where


def test_every_label_is_there() -> None:
    for where, expr in expressions():
        for series, label in matched_labels(expr):
            labels = LABELS.get(series) or OF_PROMETHEUS.get(series) or {"model"}
            assert label in labels | OF_TARGETS, (where, series, label)
        of_all = set().union(*(LABELS.get(series, set()) for series in series_in(expr)))
        assert grouped_labels(expr) <= of_all | OF_TARGETS, where


def test_choices_are_of_series_that_are_there() -> None:
    for file in FILES:
        for variable in json.loads(file.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                assert found is not None
                assert found[2] in LABELS[found[1]]


def test_the_runbook_names_what_there_is() -> None:
    told = (ROOT / "docs" / "runbook.md").read_text()
    all_boards = [json.loads(file.read_text()) for file in FILES]
    titles = {panel["title"] for board in all_boards for panel in board["panels"]}
    titles |= {board["title"] for board in all_boards} | {file.stem for file in FILES}
    assert set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", told)) <= titles
    names = {*UpSettings.model_fields, *WorkerSettings.model_fields, *FAILED_BY, *(metric.name for metric in METRICS)}
    names |= {field.name for struct in (ModelSpec, LlamaSettings) for field in msgspec.structs.fields(struct)}
    assert set(re.findall(r"`([a-z]+_[a-z_]+)`", told)) - names <= OTHERS_NAMES


def test_series_are_found_in_expressions() -> None:
    expr = 'sum by (le, x) (rate(a_total{b="c{d"}[5m])) / on (x) group_left () (max(vllm:e) > 0.5) or on () vector(0)'
    assert series_in(expr) == {"a_total", "vllm:e"}
    assert list(matched_labels(expr)) == [("a_total", "b")]
    assert grouped_labels(expr) == {"le", "x"}
