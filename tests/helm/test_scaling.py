"""What decides how many workers a model has: the series exist, and what they lead to is sensible."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.commands.config import gateway_groups, metrics_of
from gateway.settings import GatewaySettings
from tests.support.chart import CHART, Object, Rendered, example, render
from tests.support.prometheus import program
from workers.models.catalog import convert

GATEWAYS = {metric.name: metric for metric in metrics_of(gateway_groups())}
KEDA = {"keda": {"prometheusAddress": "http://prometheus:9090"}}


def scaled(**autoscaling: Any) -> Rendered:
    model = {"name": "m", "hf": "org/m", "slots": 16, "autoscaling": {"type": "keda", **autoscaling}}
    return render({**KEDA, "models": [model]})


@pytest.mark.parametrize(
    ("more", "workers"),
    [
        ({"replicas": 0}, 0),
        ({"replicas": 2}, 1),
        ({"autoscaling": {"type": "keda", "min": 0}}, 0),
        ({"autoscaling": {"type": "keda", "min": 1}, "replicas": 0}, 1),
    ],
)
def test_gateways_know_which_models_may_be_absent(more: Object, workers: int) -> None:
    """And are ready without them."""
    found = render({**KEDA, "models": [{"name": "m", "hf": "org/m", **more}]})
    catalog = convert(json.loads(found.one("ConfigMap", "gateway")["data"]["catalog.json"]), "rendered")
    assert [model.workers for model in catalog.models] == [workers]


def triggers(found: Rendered) -> dict[str, Object]:
    return {trigger["name"]: trigger for trigger in found.one("ScaledObject")["spec"]["triggers"]}


def desired(found: Rendered, current: int, in_flight: float, waiting: float, wait_s: float) -> int:
    """What an HPA makes of KEDA's values: the most that any of them asks for, within the bounds.

    Source: "Horizontal Pod Autoscaling" in Kubernetes' documentation.
    """
    values = {"in-flight": in_flight, "waiting": waiting, "predicted-wait": wait_s}
    asked = []
    for name, trigger in triggers(found).items():
        share = values[name] / float(trigger["metadata"]["threshold"])
        asked.append(math.ceil(share if trigger["metricType"] == "AverageValue" else share * current))
    spec = found.one("ScaledObject")["spec"]
    least, most = int(spec["minReplicaCount"]), int(spec["maxReplicaCount"])
    return max(1, least, min(most, max(asked)))


def is_active(found: Rendered, in_flight: float, waiting: float, wait_s: float) -> bool:
    """Whether KEDA keeps at least one worker."""
    values = {"in-flight": in_flight, "waiting": waiting, "predicted-wait": wait_s}
    return any(
        values[name] > float(trigger["metadata"]["activationThreshold"]) for name, trigger in triggers(found).items()
    )


def test_queries_name_only_what_gateways_export() -> None:
    for found in (example("keda"), example("multi-node")):
        for item in found.of("ScaledObject"):
            for trigger in item["spec"]["triggers"]:
                query = trigger["metadata"]["query"]
                named = set(re.findall(r"\bpaddock_[a-z_]+", query))
                assert named <= set(GATEWAYS), query
                (series,) = named - {"paddock_build_info"}
                assert GATEWAYS[series].labels == ("model",)
                # All gateways see the fleet alike, but each its own calls.
                assert query.startswith("max(" if series == "paddock_predicted_wait_seconds" else "sum(")


def test_each_model_is_asked_for_by_its_own_name() -> None:
    found = example("keda")
    told = {
        model
        for item in found.of("ScaledObject")
        for trigger in item["spec"]["triggers"]
        for model in re.findall(r'model="([^"]+)"', trigger["metadata"]["query"])
    }
    assert told == {"qwen3-8b", "Qwen/Qwen3-Coder-30B-A3B"}


def test_a_lost_prometheus_is_no_idle_model() -> None:
    """No series at all is an error, which takes no worker away; a scraped gateway without the series is a zero."""
    found = scaled(min=0)
    for trigger in triggers(found).values():
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert trigger["metadata"]["query"].endswith(" or 0 * sum(paddock_build_info)")
    fallback = found.one("ScaledObject")["spec"]["fallback"]
    assert fallback["behavior"] == "currentReplicasIfHigher"
    assert fallback["replicas"] >= 1


GATEWAY_SERIES = [{"series": f'paddock_build_info{{instance="{name}",version="1"}}', "values": "1x4"} for name in "ab"]
OF_MODEL = [
    {"series": f'{name}{{instance="{gateway}",model="m"}}', "values": f"{value}x4"}
    for name, values in (
        ("paddock_requests_in_flight", (3, 5)),
        ("paddock_queue_length", (0, 2)),
        ("paddock_predicted_wait_seconds", (4, 7)),
    )
    for gateway, value in zip("ab", values, strict=True)
]
OF_ANOTHER = [{"series": 'paddock_requests_in_flight{instance="a",model="m2"}', "values": "9x4"}]


@pytest.mark.parametrize(
    ("series", "found"),
    [
        ([*GATEWAY_SERIES, *OF_MODEL, *OF_ANOTHER], {"in-flight": 8, "waiting": 2, "predicted-wait": 7}),
        ([*GATEWAY_SERIES, *OF_ANOTHER], {"in-flight": 0, "waiting": 0, "predicted-wait": 0}),
        ([], {"in-flight": None, "waiting": None, "predicted-wait": None}),
    ],
    ids=["called", "idle", "no gateway"],
)
def test_prometheus_answers_with_one_number_or_none(
    series: list[Object], found: dict[str, float | None], tmp_path: Path
) -> None:
    """None is what KEDA takes for an error."""
    asked = [
        {
            "expr": trigger["metadata"]["query"],
            "eval_time": "30s",
            "exp_samples": [] if found[name] is None else [{"labels": "{}", "value": found[name]}],
        }
        for name, trigger in triggers(scaled(min=0)).items()
    ]
    rules = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": asked}]}
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps(rules))
    done = subprocess.run([program("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_call_brings_the_first_worker_and_what_runs_keeps_it() -> None:
    found = scaled(min=0)
    assert not is_active(found, 0, 0, 0)
    assert is_active(found, in_flight=1, waiting=1, wait_s=0.5)
    assert is_active(found, in_flight=1, waiting=0, wait_s=0), "it runs and nobody waits"
    assert found.one("ScaledObject")["spec"]["cooldownPeriod"] >= 60


def test_what_runs_is_never_left_without_slots() -> None:
    found = scaled(min=0, max=50)
    slots = 16
    for in_flight in range(1, 600, 7):
        workers = desired(found, current=10, in_flight=in_flight, waiting=0, wait_s=0)
        assert workers * slots >= in_flight


def test_a_line_brings_more_than_its_calls_need_and_so_does_a_long_wait() -> None:
    found = scaled(min=1, max=50)
    busy = desired(found, current=2, in_flight=24, waiting=0, wait_s=0)
    assert busy == 2
    assert desired(found, current=2, in_flight=32 + 64, waiting=64, wait_s=0) == 8
    assert desired(found, current=2, in_flight=24, waiting=0, wait_s=40) == 8
    assert desired(found, current=2, in_flight=24, waiting=0, wait_s=9) == 2


def test_workers_come_at_once_and_go_one_by_one() -> None:
    behavior = scaled().one("ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 120
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_matchers_hold_everywhere() -> None:
    found = render(
        {
            "keda": {"prometheusAddress": "http://p:9090", "matchers": 'namespace="llm"'},
            "workers": {"autoscaling": {"type": "keda"}},
        }
    )
    for trigger in triggers(found).values():
        query = trigger["metadata"]["query"]
        assert query.count('namespace="llm"') == 2
        assert query.count("{") == 2


@pytest.mark.parametrize("name", ["keda", "hpa", "cpu", "multi-node"])
def test_who_is_scaled_has_no_fixed_number(name: str) -> None:
    """Or each upgrade would set it back."""
    found = example(name)
    targets = {
        item["spec"]["scaleTargetRef"]["name"]
        for kind in ("ScaledObject", "HorizontalPodAutoscaler")
        for item in found.of(kind)
    }
    for item in found.workloads():
        if item["kind"] != "Pod":
            assert ("replicas" in item["spec"]) == (item["metadata"]["name"] not in targets)
    assert targets


def test_plain_hpas_read_the_same_series() -> None:
    found = example("hpa")
    (of_model,) = found.of("HorizontalPodAutoscaler", "worker")
    metrics = {metric["external"]["metric"]["name"]: metric["external"] for metric in of_model["spec"]["metrics"]}
    assert set(metrics) == {"paddock_requests_in_flight", "paddock_queue_length"}
    assert set(metrics) <= set(GATEWAYS)
    for metric in metrics.values():
        assert metric["metric"]["selector"]["matchLabels"] == {"model": "qwen3-8b"}
        assert metric["target"]["type"] == "AverageValue"
    (of_gateway,) = found.of("HorizontalPodAutoscaler", "gateway")
    assert {metric["type"] for metric in of_gateway["spec"]["metrics"]} == {"Resource", "Pods"}


def test_the_adapter_is_told_to_serve_what_the_hpas_ask_for(tmp_path: Path) -> None:
    text = (CHART / "examples" / "values-hpa.yaml").read_text()
    lines = [line.removeprefix("#     ") for line in text.splitlines() if line.startswith("#     ")]
    rules = yaml.safe_load("\n".join(lines))
    served = {
        kind: {rule["seriesQuery"].partition("{")[0]: rule for rule in rules[kind]}
        for kind in ("rules", "externalRules")
    }
    found = example("hpa")
    (of_model,) = found.of("HorizontalPodAutoscaler", "worker")
    (of_gateway,) = found.of("HorizontalPodAutoscaler", "gateway")
    external = {metric["external"]["metric"]["name"] for metric in of_model["spec"]["metrics"]}
    of_pods = {metric["pods"]["metric"]["name"] for metric in of_gateway["spec"]["metrics"] if "pods" in metric}
    assert (set(served["externalRules"]), set(served["rules"])) == (external, of_pods)
    recorded = []
    for kind, labels in (("rules", ["namespace", "pod"]), ("externalRules", ["namespace"])):
        for name, rule in served[kind].items():
            assert list(rule["resources"]["overrides"]) == labels
            query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
            recorded.append({"record": f"a:{kind}:{name}", "expr": query.replace("<<.LabelMatchers>>", 'model="m"')})
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "adapter", "rules": recorded}]}))
    done = subprocess.run([program("promtool"), "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(recorded) == 3


def test_calls_are_held_for_as_long_as_a_first_worker_takes() -> None:
    """A model at zero is no refused call: the gateway waits longer than it does for a slot."""
    settings = {
        entry["name"]: entry.get("value")
        for entry in example("keda").one("Deployment", "gateway")["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    held_s = float(settings["PADDOCK_START_TIMEOUT_S"] or 0)
    assert held_s > GatewaySettings.model_fields["queue_timeout_s"].default
