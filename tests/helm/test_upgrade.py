"""An upgrade is one that Kubernetes takes: what can't be changed stays as it was installed, and names are kept."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import CHART, Object, Rendered, container, example, render

INSTALLED = Path(__file__).with_name("installed.json")
"""What releases of before have in clusters: object -> its parts that no upgrade may change."""

FIXED: dict[str, tuple[str, ...]] = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy"),
    "Service": ("clusterIP",),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
    "ScaledObject": ("scaleTargetRef",),
}
"""Source: the validation of updates in Kubernetes' API (apps/v1, v1)."""


def fixed(found: Rendered) -> dict[str, Object]:
    return {
        f"{item['kind']}/{item['metadata']['name']}": {
            part: item["spec"].get(part) for part in FIXED.get(item["kind"], ())
        }
        for item in found.objects
        if item["kind"] != "Pod"
    }


def installed() -> dict[str, dict[str, Object]]:
    return {name: fixed(example(name)) for name in ("cpu", "multi-node", "keda", "1-gpu", "external-redis", "hpa")}


@pytest.mark.parametrize("name", sorted(json.loads(INSTALLED.read_text())))
def test_what_is_installed_can_be_upgraded(name: str) -> None:
    """Where this fails, clusters would refuse the upgrade, or objects would be made anew under other names."""
    before, after = json.loads(INSTALLED.read_text())[name], fixed(example(name))
    assert {key: after.get(key) for key in before} == before


@pytest.fixture(scope="module")
def next_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as its next version would be."""
    folder = tmp_path_factory.mktemp("next") / "helm"
    shutil.copytree(CHART, folder)
    said = (folder / "Chart.yaml").read_text()
    (folder / "Chart.yaml").write_text(said.replace("ersion: 0.1.0", "ersion: 0.2.0"))
    return folder


@pytest.mark.parametrize("name", ["cpu", "keda", "multi-node"])
def test_a_new_version_changes_images_and_nothing_that_is_fixed(name: str, next_chart: Path) -> None:
    file = CHART / "examples" / f"values-{name}.yaml"
    before, after = render({}, file), render({}, file, chart=next_chart)
    assert fixed(before) == fixed(after)
    for old, new in zip(before.pods(), after.pods(), strict=True):
        (told, _), (_, pod) = old, new
        component = told["labels"]["app.kubernetes.io/component"]
        assert told["labels"] == new[0]["labels"] or component == "test"
        tag = container(pod)["image"].rpartition(":")[2]
        assert (tag == "0.2.0") == (component not in ("redis", "postgres"))
        if component in ("redis", "postgres"):
            assert old == new, "a new version of the chart must not restart what keeps data"


OTHER_VALUES: dict[str, dict[str, Any]] = {
    "more gateways": {"gateway": {"replicas": 5, "settleS": 20}},
    "longer calls": {"gateway": {"settings": {"request_timeout_s": 7200}}},
    "another image": {"image": {"tag": "0.1.1", "registry": "registry.example.com"}},
    "monitoring": {"monitoring": {"enabled": True, "rules": True, "dashboards": True}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "resources": {"workers": {"resources": {"limits": {"memory": "64Gi"}}}},
    "labels": {
        "commonLabels": {"team": "ml"},
        "gateway": {"podLabels": {"a": "b"}},
        "workers": {"podLabels": {"a": "b"}},
    },
    "scaled": {"keda": {"prometheusAddress": "http://p"}, "workers": {"autoscaling": {"type": "keda"}}},
    "a prompt cache": {"workers": {"promptCache": {"type": "claim"}}},
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_other_values_leave_what_is_fixed(name: str) -> None:
    before, after = fixed(render({})), fixed(render(OTHER_VALUES[name]))
    kept = {key: parts for key, parts in before.items() if not key.startswith("NetworkPolicy/")}
    assert {key: after.get(key) for key in kept} == kept


def test_a_model_that_comes_or_moves_leaves_the_others_alone() -> None:
    one = {"name": "a", "hf": "org/a"}
    two = {"name": "B/b", "hf": "org/b", "kind": "StatefulSet", "promptCache": {"type": "claim"}}

    def workers(*models: Object) -> dict[str, Object]:
        found = render({"models": list(models)})
        return {
            item["metadata"]["name"]: item
            for item in (*found.of("Deployment", "worker"), *found.of("StatefulSet", "worker"))
        }

    alone, both, turned = workers(one), workers(one, two), workers(two, one)
    assert both == turned
    assert alone.items() <= both.items()


def test_names_are_valid_and_stay_apart() -> None:
    names = ["a", "A", "a.b", "a-b", "a" * 40, "a" * 41, "org/model:Q4_K_M", "org/model:Q5_K_M", "9", "x+y@z"]
    found = render(
        {"models": [{"name": name, "hf": "org/m", "kind": "StatefulSet"} for name in names]}, release="r" * 53
    )
    made = [item["metadata"]["name"] for item in found.of("StatefulSet", "worker")]
    assert len(set(made)) == len(names)
    for name in made:
        assert len(name) <= 52, "a StatefulSet's pods get a label that is 11 characters longer"
        assert name.replace("-", "").isalnum()
        assert name == name.lower()
        assert not name.endswith("-")


def test_two_releases_do_not_meet() -> None:
    one, other = render({}, release="one"), render({}, release="other")
    assert not set(fixed(one)) & set(fixed(other))
    for item in one.workloads():
        if item["kind"] == "Pod":
            continue
        selector = item["spec"]["selector"]["matchLabels"].items()
        assert not any(selector <= told["labels"].items() for told, _ in other.pods())


if __name__ == "__main__":
    # `python -m tests.helm.test_upgrade` notes what is released. What stood there before must stay.
    INSTALLED.write_text(json.dumps(installed(), indent=1, sort_keys=True) + "\n")
    sys.exit(0)
