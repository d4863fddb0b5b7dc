"""Who watches finds the pods, and reads the boards and rules that are shipped."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.support.chart import CHART, render

ON: dict[str, Any] = {"monitoring": {"enabled": True, "rules": True, "dashboards": True, "labels": {"release": "prom"}}}


def test_monitors_find_their_pods() -> None:
    found = render(ON)
    (service,) = found.of("Service", "gateway")
    chosen = found.one("ServiceMonitor")["spec"]
    assert chosen["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert chosen["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    others = [item for item in found.of("Service") if item is not service]
    assert not any(chosen["selector"]["matchLabels"].items() <= other["metadata"]["labels"].items() for other in others)
    of_pods = found.one("PodMonitor")["spec"]
    selected = [
        pod["containers"][0]["ports"][0]["name"]
        for told, pod in found.pods()
        if of_pods["selector"]["matchLabels"].items() <= told["labels"].items()
    ]
    assert selected == [of_pods["podMetricsEndpoints"][0]["port"]]
    assert all(found.one(kind)["metadata"]["labels"]["release"] == "prom" for kind in ("ServiceMonitor", "PodMonitor"))


def test_workers_get_the_labels_that_boards_ask_for() -> None:
    """As `GET /metrics/targets` of a gateway gives them: the model's true name, and the worker's."""
    found = render({**ON, "models": [{"name": "org/Model:Q4", "hf": "org/m"}]})
    (relabelings,) = (each["relabelings"] for each in found.one("PodMonitor")["spec"]["podMetricsEndpoints"])
    assert {"model", "worker", "job"} == {each["targetLabel"] for each in relabelings}
    annotated = next(
        told["annotations"] for told, _ in found.pods() if told["labels"]["app.kubernetes.io/component"] == "worker"
    )
    assert annotated["paddock/model"] == "org/Model:Q4"
    source = next(each["sourceLabels"] for each in relabelings if each["targetLabel"] == "model")
    assert source == ["__meta_kubernetes_pod_annotation_paddock_model"]


def test_boards_and_rules_are_those_of_the_files() -> None:
    found = render({**ON, "monitoring": {**ON["monitoring"], "runbook": "https://wiki.example.com/paddock"}})
    boards = sorted((CHART / "files" / "dashboards").glob("*.json"))
    shipped = {
        name: json.loads(text)
        for item in found.of("ConfigMap")
        if item["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in item["data"].items()
    }
    assert shipped == {file.name: json.loads(file.read_text()) for file in boards}
    assert shipped
    files = sorted((CHART / "files" / "rules").glob("*.yaml"))
    rules = {item["metadata"]["name"]: item["spec"] for item in found.of("PrometheusRule")}
    assert set(rules) == {f"p-paddock-{file.stem}" for file in files}
    for file in files:
        text = file.read_text().replace("docs/runbook.md", "https://wiki.example.com/paddock")
        assert rules[f"p-paddock-{file.stem}"] == {"groups": yaml.safe_load(text)["groups"]}


def test_nothing_of_it_is_there_unasked() -> None:
    kinds = {item["kind"] for item in render({}).objects}
    assert not {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"} & kinds
