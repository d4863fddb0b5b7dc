"""Every object of every rendering is one that Kubernetes, or whoever defines its kind, takes as it is."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import go_tools
from tests.support.chart import CHART, EXAMPLES, KUBERNETES, Object, container, render
from tests.support.kubernetes_schemas import NoSchema, mistakes

OLDEST, NEWEST = "1.27", "1.37"
"""What Chart.yaml asks for, and what is known of today."""

ALL_ON: dict[str, Any] = {
    "ingress": {"enabled": True, "hosts": ["llm.example.com"]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
    "monitoring": {"enabled": True, "rules": True, "dashboards": True, "labels": {"release": "prometheus"}},
    "keda": {"prometheusAddress": "http://prometheus:9090", "authenticationRef": "prom", "authModes": "bearer"},
    "gateway": {"autoscaling": {"enabled": True, "inFlight": 200}},
    "workers": {"autoscaling": {"type": "keda", "min": 0}},
    "redis": {"persistence": {"enabled": True, "storageClass": "fast"}},
    "networkPolicy": {"callers": [{"namespaceSelector": {}}]},
}

TOGGLES: dict[str, dict[str, Any]] = {
    "as-it-is": {},
    "all-on": ALL_ON,
    "no-policies": {"networkPolicy": {"enabled": False}},
    "own-secret": {
        "secrets": {
            "existingSecret": "keys",
            "existingSecretHolds": ["api-keys", "cache-secret", "hf-token", "metrics-key"],
        }
    },
    "given-keys": {
        "secrets": {
            "apiKey": "sk-1",
            "workerSecret": "w",
            "redisPassword": "r",
            "cacheSecret": "c",
            "hfToken": "h",
            "metricsKey": "m",
            "apiKeys": [{"name": "ci", "team": "red", "sha256": "0" * 64}],
            "oidc": {"providers": [{"issuer": "https://id.example.com", "client_id": "paddock"}]},
        }
    },
    "own-account": {"serviceAccount": {"create": False, "name": "mine"}, "imagePullSecrets": [{"name": "registry"}]},
    "ipv6": {"ipv6": True},
    "names": {"fullnameOverride": "a-name-that-is-much-longer-than-24-characters", "commonLabels": {"team": "ml"}},
    "budgets-off": {
        "gateway": {"podDisruptionBudget": {"enabled": False}, "spread": False},
        "workers": {"podDisruptionBudget": {"enabled": False}, "spread": False},
    },
    "extras": {
        "gateway": {
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "extraContainers": [{"name": "proxy", "image": "proxy:1"}],
            "extraInitContainers": [{"name": "first", "image": "first:1"}],
            "podAnnotations": {"x": "y"},
            "podLabels": {"x": "y"},
            "priorityClassName": "high",
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
            ],
        },
        "workers": {
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "podAnnotations": {"x": "y"},
            "podLabels": {"x": "y"},
            "priorityClassName": "high",
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "runtimeClassName": "nvidia",
            "extraContainers": [{"name": "proxy", "image": "proxy:1"}],
            "extraInitContainers": [{"name": "first", "image": "first:1"}],
        },
        "accounts": {
            "extraContainers": [{"name": "proxy", "image": "proxy:1"}],
            "extraInitContainers": [{"name": "first", "image": "first:1"}],
        },
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}],
    },
    "sources": {
        "modelCache": {"type": "existing", "existingClaim": "models"},
        "models": [
            {"name": "a", "path": "a.gguf", "kind": "StatefulSet", "promptCache": {"type": "claim"}},
            {
                "name": "org/B:Q4",
                "url": "https://example.com/b.gguf",
                "sha256": "0" * 64,
                "replicas": 0,
                "modelCache": {"type": "emptyDir"},
                "promptCache": {"type": "emptyDir"},
            },
            {
                "name": "c",
                "hf": "org/c",
                "modelCache": {"type": "claim"},
                "promptCache": {"type": "existing", "existingClaim": "p"},
                "image": "registry.example.com/worker:1",
                "gpus": 2,
                "autoscaling": {"type": "hpa"},
            },
            {"name": "d", "hf": "org/d", "kind": "StatefulSet", "modelCache": {"type": "claim"}},
        ],
    },
}

RENDERINGS = [
    *(pytest.param({}, (file,), id=file.stem.removeprefix("values-")) for file in EXAMPLES),
    *(pytest.param(values, (), id=name) for name, values in TOGGLES.items()),
]


@cache
def found_wrong(text: str, version: str) -> tuple[str, ...]:
    """Most renderings have most objects in common."""
    return tuple(mistakes(json.loads(text), version))


@pytest.mark.parametrize(("values", "files"), RENDERINGS)
def test_every_object_is_valid(values: dict[str, Any], files: tuple[Path, ...]) -> None:
    texts = [json.dumps(item) for item in render(values, *files).objects]
    assert [wrong for text in texts for version in (OLDEST, NEWEST) for wrong in found_wrong(text, version)] == []


@pytest.mark.parametrize(("values", "files"), RENDERINGS)
def test_no_two_objects_have_one_name(values: dict[str, Any], files: tuple[Path, ...]) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in render(values, *files).objects]
    assert len(names) == len(set(names))


def test_the_matrix_has_every_kind_that_the_chart_can_make() -> None:
    made = {item["kind"] for values in TOGGLES.values() for item in render(values).objects}
    for template in CHART.rglob("templates/**/*.yaml"):
        for line in template.read_text().splitlines():
            if line.startswith("kind: ") and "{{" not in line:
                assert line.removeprefix("kind: ") in made, template
    assert {"Deployment", "StatefulSet"} <= made


def test_the_oldest_kubernetes_is_the_one_that_the_chart_asks_for() -> None:
    assert f'kubeVersion: ">={OLDEST}.0-0"' in (CHART / "Chart.yaml").read_text()


BROKEN: list[Object] = [
    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {"replicaz": 1}},
    {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "x"},
        "spec": {"scaleTargetRef": {"name": "x"}, "triggers": [], "minReplicas": 1},
    },
    {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "x"},
        "spec": {"selector": {}, "podMetricsEndpoints": [{"porte": "http"}]},
    },
    {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "x"},
        "spec": {"rules": [{"timeouts": {"request": 5}}]},
    },
]


@pytest.mark.parametrize("item", BROKEN, ids=lambda item: str(item["kind"]))
def test_a_mistake_is_found(item: Object) -> None:
    assert mistakes(item, NEWEST) != []


def test_a_kind_that_nobody_describes_fails() -> None:
    for api_version in ("apps/v1", "keda.sh/v1alpha1"):
        with pytest.raises(NoSchema):
            mistakes({"apiVersion": api_version, "kind": "Nonsense", "metadata": {"name": "x"}}, NEWEST)


def test_helm_lints_it() -> None:
    command = [str(go_tools.helm()), "lint", str(CHART), "--strict", "--kube-version", KUBERNETES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_large_numbers_are_written_as_they_are() -> None:
    found = render(
        {
            "gateway": {"settings": {"max_body_bytes": 16777216}},
            "models": [{"name": "a", "path": "/a", "ctx": 16777216}],
        }
    )
    told = {entry["name"]: entry.get("value") for _, pod in found.pods() for entry in container(pod)["env"]}
    assert (told["PADDOCK_MAX_BODY_BYTES"], told["PADDOCK_CTX"]) == ("16777216", "16777216")
