"""The chart as `helm template` writes it: objects, and what they say of pods."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support import go_tools

CHART = Path(__file__).resolve().parents[2] / "helm"
EXAMPLES = sorted((CHART / "examples").glob("values-*.yaml"))
KUBERNETES = "1.33.0"
TIMEOUT_S = 60.0

REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
"""How Kubernetes reads a variable's value: a reference to one before it, or an escaped sign."""

Object = dict[str, Any]
PODS = ("Deployment", "StatefulSet", "Pod")


class Refused(Exception):
    """helm rendered nothing; its words."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """All objects of one rendering."""

    objects: tuple[Object, ...]

    def of(self, kind: str, component: str = "") -> list[Object]:
        """Of one kind; of one component where one is named."""
        label = "app.kubernetes.io/component"
        return [
            item
            for item in self.objects
            if item["kind"] == kind and component in ("", item["metadata"]["labels"].get(label))
        ]

    def one(self, kind: str, component: str = "") -> Object:
        (found,) = self.of(kind, component)
        return found

    def workloads(self) -> list[Object]:
        return [item for item in self.objects if item["kind"] in PODS]

    def pods(self) -> Iterator[tuple[Object, Object]]:
        """Name and labels, and the specification, of each kind of pod."""
        for item in self.workloads():
            template = item if item["kind"] == "Pod" else item["spec"]["template"]
            yield {"name": item["metadata"]["name"], **template["metadata"]}, template["spec"]


def render(
    values: Mapping[str, Any] | None = None,
    *files: Path,
    chart: Path = CHART,
    release: str = "p",
    namespace: str = "llm",
    flags: tuple[str, ...] = (),
) -> Rendered:
    """Values over those of the files. Raises Refused."""
    text = json.dumps(values or {}, sort_keys=True)
    return _rendered(text, files, chart, release, namespace, flags)


def example(name: str, values: Mapping[str, Any] | None = None) -> Rendered:
    """One of the chart's examples, by what stands between `values-` and `.yaml`."""
    return render(values, CHART / "examples" / f"values-{name}.yaml")


@cache
def _rendered(
    values: str, files: tuple[Path, ...], chart: Path, release: str, namespace: str, flags: tuple[str, ...]
) -> Rendered:
    command = [str(go_tools.helm()), "template", release, str(chart), "--namespace", namespace]
    command += ["--kube-version", KUBERNETES, *flags]
    for file in files:
        command += ["--values", str(file)]
    done = subprocess.run(
        [*command, "--values", "-"], input=values, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise Refused(done.stderr)
    return Rendered(tuple(item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item))


def container(pod: Object) -> Object:
    (found,) = pod["containers"]
    return dict(found)


def plain_env(of: Object, known: Mapping[str, str]) -> dict[str, str]:
    """A container's variables as its process would see them; `known` are the fields and the keys of Secrets.

    Raises KeyError for what refers to something that is not known.
    """
    seen: dict[str, str] = {}
    for entry in of.get("env", ()):
        if "value" in entry:
            value = str(entry["value"])
        else:
            source = entry["valueFrom"]
            reference = source.get("secretKeyRef", {}).get("key") or source["fieldRef"]["fieldPath"]
            value = known[reference]
        value = REFERENCE.sub(lambda found: "$" if found[0] == "$$" else seen.get(found[1], found[0]), value)
        assert entry["name"] not in seen, f"{entry['name']} is set twice"
        seen[entry["name"]] = value
    return seen
