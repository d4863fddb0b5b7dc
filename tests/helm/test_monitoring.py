"""Who watches finds the pods, and reads the boards and rules that are shipped."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, Refused, render

ON: dict[str, Any] = {"monitoring": {"enabled": True, "rules": True, "dashboards": True, "labels": {"release": "prom"}}}


def test_monitors_find_their_pods() -> None:
    """By their labels, drained ones too: those are no endpoints of a Service any more."""
    found = render(ON)
    assert not found.of("ServiceMonitor")
    for component in ("gateway", "worker", "accounts"):
        monitor = found.one("PodMonitor", component)
        assert monitor["metadata"]["labels"]["release"] == "prom"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        chosen = [
            (told["labels"]["app.kubernetes.io/component"], pod["containers"][0]["ports"][0]["name"])
            for told, pod in found.pods()
            if monitor["spec"]["selector"]["matchLabels"].items() <= told["labels"].items()
        ]
        assert chosen == [(component, endpoint["port"])]
        assert {"targetLabel": "job", "action": "replace", "replacement": f"paddock-{component}"} in endpoint[
            "relabelings"
        ]
        # A pod that still fetches its model is Pending: nobody listens there, and that is no alert.
        assert endpoint["relabelings"][0] == {
            "action": "keep",
            "sourceLabels": ["__meta_kubernetes_pod_phase"],
            "regex": "Running",
        }


def test_workers_get_the_labels_that_boards_ask_for() -> None:
    """As `GET /metrics/targets` of a gateway gives them: the model's true name, and the worker's."""
    found = render({**ON, "models": [{"name": "org/Model:Q4", "hf": "org/m"}]})
    (relabelings,) = (each["relabelings"] for each in found.one("PodMonitor", "worker")["spec"]["podMetricsEndpoints"])
    assert {"model", "worker", "job"} == {each["targetLabel"] for each in relabelings if each["action"] == "replace"}
    annotated = next(
        told["annotations"] for told, _ in found.pods() if told["labels"]["app.kubernetes.io/component"] == "worker"
    )
    assert annotated["paddock/model"] == "org/Model:Q4"
    source = next(each["sourceLabels"] for each in relabelings if each.get("targetLabel") == "model")
    assert source == ["__meta_kubernetes_pod_annotation_paddock_model"]


KEY_SOURCES: dict[str, dict[str, Any]] = {
    "given": {"metricsKey": "mk-1"},
    "in a Secret of one's own": {"existingSecret": "p-paddock", "existingSecretHolds": ["metrics-key"]},
}


@pytest.mark.parametrize("source", KEY_SOURCES)
def test_the_monitor_sends_the_metrics_key_that_gateways_ask_for(source: str) -> None:
    found = render({**ON, "secrets": KEY_SOURCES[source]})
    (endpoint,) = found.one("PodMonitor", "gateway")["spec"]["podMetricsEndpoints"]
    where = {"name": "p-paddock", "key": "metrics-key"}
    assert endpoint["authorization"] == {"credentials": where}
    (gateway,) = (
        pod["containers"][0] for told, pod in found.pods() if told["labels"]["app.kubernetes.io/component"] == "gateway"
    )
    (asked,) = (each["valueFrom"] for each in gateway["env"] if each["name"] == "PADDOCK_METRICS_KEY")
    assert asked == {"secretKeyRef": where}
    if source == "given":
        assert found.one("Secret")["stringData"]["metrics-key"] == "mk-1"
    # A worker asks for none, and one that has fallen learns none.
    (endpoint,) = found.one("PodMonitor", "worker")["spec"]["podMetricsEndpoints"]
    assert "authorization" not in endpoint


def test_without_a_metrics_key_nobody_asks_for_one() -> None:
    found = render(ON)
    (endpoint,) = found.one("PodMonitor", "gateway")["spec"]["podMetricsEndpoints"]
    assert "authorization" not in endpoint
    assert "METRICS_KEY" not in json.dumps(found.objects)
    with pytest.raises(Refused, match="metrics_key"):
        render({"gateway": {"settings": {"metrics_key": "in everybody's sight"}}})


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


def test_without_the_accounts_service_nobody_looks_for_it() -> None:
    found = render({**ON, "accounts": {"enabled": False}})
    assert len(found.of("PodMonitor")) == 2


def test_nothing_of_it_is_there_unasked() -> None:
    kinds = {item["kind"] for item in render({}).objects}
    assert not {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"} & kinds
