"""What an install tells its operator: every object, key and address in it is there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import CHART, Rendered, render

SHOWN = """apiVersion: v1
kind: ConfigMap
metadata:
  name: notes
  labels: {}
data:
  notes: {{ tpl (.Files.Get "files/NOTES.txt") . | toJson }}
"""
"""`helm template` keeps the notes to itself."""

Notes = Callable[[dict[str, Any]], tuple[str, Rendered]]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """Values -> the notes, and the objects beside them."""
    chart = tmp_path_factory.mktemp("notes") / "helm"
    shutil.copytree(CHART, chart)
    shutil.move(chart / "templates" / "NOTES.txt", chart / "files" / "NOTES.txt")
    Path(chart, "templates", "shown.yaml").write_text(SHOWN)

    def told(values: dict[str, Any]) -> tuple[str, Rendered]:
        found = render(values, chart=chart)
        (text,) = (item["data"]["notes"] for item in found.objects if item["metadata"]["name"] == "notes")
        return str(text), Rendered(tuple(item for item in found.objects if item["metadata"]["name"] != "notes"))

    return told


def test_the_first_steps_are_true(notes: Notes) -> None:
    text, found = notes({})
    (deployment,) = re.findall(r"rollout status deployment/(\S+)", text)
    assert deployment == found.one("Deployment", "gateway")["metadata"]["name"]
    ((secret, key),) = re.findall(r"get secret (\S+) -o jsonpath='\{\.data\.([\w-]+)\}'", text)
    assert secret == found.one("Secret")["metadata"]["name"]
    assert key in found.one("Secret")["stringData"]
    ((service, port),) = re.findall(r"port-forward service/(\S+) 8080:(\d+)", text)
    of_gateway = found.one("Service", "gateway")
    assert (service, int(port)) == (of_gateway["metadata"]["name"], of_gateway["spec"]["ports"][0]["port"])
    assert '"model": "gemma-3-1b"' in text
    assert "held, for 900 s at most:\n\n   kubectl" in text
    assert "\n\n4. Or have" in text
    assert "$URL/ui is a console" in text
    assert "-n llm test p --timeout 17m\n" in text
    assert "were generated and stay over upgrades" in text
    assert "Redis keeps nothing on disk" in text
    assert "Network policies are off" not in text
    assert "KEDA" not in text
    assert "Alerts link to" not in text


def test_they_follow_the_values(notes: Notes) -> None:
    text, _ = notes(
        {
            "ingress": {"enabled": True, "hosts": ["llm.example.com"], "tls": [{"secretName": "tls"}]},
            "secrets": {"existingSecret": "mine"},
            "redis": {"persistence": {"enabled": True}},
            "networkPolicy": {"enabled": False},
            "monitoring": {"rules": True},
            "workers": {"autoscaling": {"type": "keda"}},
            "keda": {"prometheusAddress": "http://prom:9090"},
            "test": {"timeoutS": 3601},
        }
    )
    assert "export URL=https://llm.example.com\n" in text
    assert "get secret mine " in text
    assert "port-forward" not in text
    assert "were generated" not in text
    assert "Redis keeps nothing" not in text
    assert "Network policies are off" in text
    assert "set monitoring.runbook to the address" in text
    assert "KEDA, 2.18 or later" in text
    assert "while http://prom:9090 is away" in text
    assert "--timeout 63m\n" in text


def test_a_console_that_is_off_is_not_told_of(notes: Notes) -> None:
    assert "console" not in notes({"gateway": {"settings": {"console": False}}})[0]


def test_a_runbook_that_has_an_address_needs_no_words(notes: Notes) -> None:
    text, _ = notes({"monitoring": {"rules": True, "runbook": "https://wiki.example.com/paddock"}})
    assert "Alerts link to" not in text


def test_helm_waits_for_longer_than_the_test_may_take(notes: Notes) -> None:
    """The pod's own deadline ends it, so that its words are there to be read."""
    text, found = notes({"test": {"timeoutS": 1000}})
    (minutes,) = re.findall(r"--timeout (\d+)m", text)
    assert int(minutes) * 60 > found.one("Pod")["spec"]["activeDeadlineSeconds"]


def test_images_without_a_registry_are_told(notes: Notes) -> None:
    text, found = notes({})
    (told,) = re.findall(r"WARNING: no registry is named for (.*)\.\n", text)
    asked = {each["image"] for _, pod in found.pods() for each in pod["containers"]}
    assert set(told.split(", ")) == {image for image in asked if image.startswith("paddock-")}
    assert "push the images to a registry of yours, and set image.registry to it" in text


@pytest.mark.parametrize("registry", ["registry.example.com/llm", "10.0.0.1:5000", "an-account-at-docker-hub"])
def test_images_of_a_registry_need_no_words(notes: Notes, registry: str) -> None:
    assert "WARNING" not in notes({"image": {"registry": registry}})[0]


def test_only_images_that_are_used_are_told(notes: Notes) -> None:
    model = {"name": "m", "hf": "org/m", "image": "registry.example.com/worker:1"}
    text, _ = notes({"models": [model], "accounts": {"enabled": False}})
    assert re.findall(r"no registry is named for (.*):", text) == ["paddock-gateway"]
