"""The chart's values are declared once: the file, its schema, its table and its examples say the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import gateway
from chart_values.kinds import Schema
from chart_values.told import defaults, descriptions
from tests.support.chart import CHART, EXAMPLES

ROOT = CHART.parent
VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_the_schema_and_the_table_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "chart" / "write_values.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python deploy/chart/write_values.py"
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_the_schema_has_all_that_it_refers_to() -> None:
    """helm refuses all values where one reference leads nowhere, also one that no value comes to."""
    text = json.dumps(SCHEMA)
    assert set(re.findall(r'"#/definitions/(\w+)"', text)) == set(SCHEMA["definitions"])


@pytest.mark.parametrize("file", [CHART / "values.yaml", *EXAMPLES], ids=lambda file: file.stem)
def test_the_files_fit_the_schema(file: Path) -> None:
    """As helm sees them: over the chart's own values."""
    jsonschema.validate(_over(yaml.safe_load(VALUES), yaml.safe_load(file.read_text())), SCHEMA)


def _over(values: Any, given: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(given, dict):
        return given
    return {**values, **{name: _over(values.get(name), said) for name, said in given.items()}}


def mappings(schema: Schema, path: str = "") -> list[tuple[str, Schema]]:
    """Every mapping of the values that has fields of its own."""
    if schema.get("type") == "array":
        return mappings(schema["items"], f"{path}[]")
    found = [(path, schema)] if "properties" in schema else []
    for name, inner in schema.get("properties", {}).items():
        found += mappings(inner, f"{path}.{name}")
    return found


def test_no_mapping_takes_what_it_does_not_know() -> None:
    found = mappings(SCHEMA)
    assert len(found) > 30
    for path, mapping in (*found, *((name, part) for name, part in SCHEMA["definitions"].items())):
        assert mapping["additionalProperties"] is False, path


def test_every_value_has_a_default_and_every_default_a_schema() -> None:
    """But fields of models, the jobs that have a model by default, and what Helm itself puts in."""
    own: dict[str, Any] = {
        name: part for name, part in SCHEMA["properties"].items() if name not in ("models", "default", "global")
    }
    known = {path.strip(".") for path, _ in _leaves({"properties": own}, "")}
    given = {path for path, _ in defaults(VALUES)}
    open_ones = {path for path in known if any(other.startswith(f"{path}.") for other in given)}
    assert known - open_ones <= given | {
        "workers.resources.claims",
        "gateway.resources.claims",
        "redis.resources.claims",
        "accounts.resources.claims",
        "postgres.resources.claims",
    }
    for path in given - known:
        assert any(path.startswith(f"{other}.") for other in open_ones) or path in ("models", "default"), path


def _leaves(schema: Schema, path: str) -> list[tuple[str, Schema]]:
    if "properties" not in schema:
        return [(path, schema)]
    return [leaf for name, inner in schema["properties"].items() for leaf in _leaves(inner, f"{path}.{name}")]


def test_what_needs_words_has_them() -> None:
    told = descriptions(VALUES)
    assert len(told) > 60
    assert told["keda.prometheusAddress"].startswith("Prometheus that scrapes the gateways")
    assert (
        told["workers.autoscaling.waitS"]
        == "and more of them, as long as a new call would wait longer than so many seconds."
    )


def test_versions_are_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == gateway.__version__


def test_redis_is_the_one_of_compose() -> None:
    compose = ROOT / "docker-compose.yml"
    if not compose.is_file():
        pytest.skip("no docker-compose.yml")
    used = yaml.safe_load(compose.read_text())["services"]["redis"]["image"]
    assert yaml.safe_load(VALUES)["redis"]["image"] == used


def test_every_example_is_told_of() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for file in EXAMPLES:
        assert f"examples/{file.name}" in page


def test_pages_let_helm_test_take_as_long_as_it_may() -> None:
    """Its pod ends a minute after the answer's time, and helm has to be there to see it."""
    wanted_s = yaml.safe_load(VALUES)["test"]["timeoutS"] + 120
    told = [
        (file, minutes)
        for file in (*sorted((ROOT / "docs").glob("*.md")), CHART / "README.md")
        for minutes in re.findall(r"^ +helm test paddock(?:.* --timeout (\d+)m)?", file.read_text(), re.MULTILINE)
    ]
    assert len(told) == 3
    assert {minutes for _, minutes in told} == {str(-(-wanted_s // 60))}, told


def test_the_page_tells_what_keda_and_a_shared_prometheus_ask() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert "KEDA 2.18 or later" in page
    assert "A model at zero can't start while Prometheus is away" in page
    assert "set `monitoring.rules` in one of them only" in page
    assert "once per Prometheus" in descriptions(VALUES)["monitoring.rules"]


def test_the_page_names_values_that_there_are() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text() + (CHART / "README.md").read_text().partition("<!--")[0]
    known = {path for path, _ in defaults(VALUES)} | {path.strip(".") for path, _ in mappings(SCHEMA)}
    tops = set(SCHEMA["properties"])
    for name in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)`", page):
        if name.partition(".")[0] in tops:
            assert name in known or f"models[].{name}" in known, name
