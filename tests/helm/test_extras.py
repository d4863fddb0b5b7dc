"""What operators add: containers beside the chart's own, and objects of the release."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import Object, Rendered, render

SIDECAR: Object = {
    "name": "proxy",
    "image": "registry.example.com/proxy:1",
    "volumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
}
NATIVE_SIDECAR: Object = {"name": "tunnel", "image": "registry.example.com/tunnel:1", "restartPolicy": "Always"}
EXTRAS: dict[str, Any] = {
    "extraContainers": [SIDECAR],
    "extraInitContainers": [NATIVE_SIDECAR],
    "extraVolumes": [{"name": "certificates", "secret": {"secretName": "certificates"}}],
}
FILE = {"models": [{"name": "m", "path": "/models/m.gguf"}]}


def spec_of(found: Rendered, component: str) -> Object:
    return dict(found.one("Deployment", component)["spec"]["template"]["spec"])


@pytest.mark.parametrize(
    ("component", "value", "before"),
    [("gateway", "gateway", []), ("accounts", "accounts", []), ("worker", "workers", ["fetch"])],
)
def test_containers_are_added_to_the_charts_own(component: str, value: str, before: list[str]) -> None:
    spec = spec_of(render({value: EXTRAS}), component)
    assert [each["name"] for each in spec["containers"]] == [component, "proxy"]
    assert spec["containers"][1] == SIDECAR
    assert [each["name"] for each in spec["initContainers"]] == [*before, "tunnel"]
    assert spec["initContainers"][-1] == NATIVE_SIDECAR
    assert EXTRAS["extraVolumes"][0] in spec["volumes"]


def test_a_worker_whose_file_is_there_has_the_added_ones_alone() -> None:
    assert spec_of(render({"workers": EXTRAS, **FILE}), "worker")["initContainers"] == [NATIVE_SIDECAR]
    assert "initContainers" not in spec_of(render(FILE), "worker")


def test_one_model_may_have_containers_of_its_own() -> None:
    models = [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b", "extraContainers": [SIDECAR]}]
    found = render({"models": models})
    counts = {
        item["metadata"]["name"]: len(item["spec"]["template"]["spec"]["containers"])
        for item in found.of("Deployment", "worker")
    }
    assert counts == {"p-paddock-worker-a": 1, "p-paddock-worker-b": 2}


def test_extra_objects_are_templates() -> None:
    as_mapping: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-motd", "labels": {"app.kubernetes.io/component": "motd"}},
        "data": {"port": "{{ .Values.gateway.service.port }}"},
    }
    as_text = """
apiVersion: v1
kind: Secret
metadata:
  name: {{ include "paddock.fullname" . }}-extra
  labels: {{ include "paddock.labels" (dict "root" . "component" "extra") | nindent 4 }}
"""
    found = render({"extraObjects": [as_mapping, as_text]})
    assert found.one("ConfigMap", "motd")["metadata"]["name"] == "p-motd"
    assert found.one("ConfigMap", "motd")["data"] == {"port": "80"}
    assert found.one("Secret", "extra")["metadata"]["name"] == "p-paddock-extra"
    assert len(found.objects) == len(render({}).objects) + 2
