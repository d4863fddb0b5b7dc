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
    assert "held, for 900 s at most" in text
    assert "-n llm test p" in text
    assert "were generated and stay over upgrades" in text
    assert "Redis keeps nothing on disk" in text
    assert "Network policies are off" not in text


def test_they_follow_the_values(notes: Notes) -> None:
    text, _ = notes(
        {
            "ingress": {"enabled": True, "hosts": ["llm.example.com"], "tls": [{"secretName": "tls"}]},
            "secrets": {"existingSecret": "mine"},
            "redis": {"persistence": {"enabled": True}},
            "networkPolicy": {"enabled": False},
        }
    )
    assert "export URL=https://llm.example.com\n" in text
    assert "get secret mine " in text
    assert "port-forward" not in text
    assert "were generated" not in text
    assert "Redis keeps nothing" not in text
    assert "Network policies are off" in text
