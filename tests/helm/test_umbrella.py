"""The chart as a dependency of another one, under another name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gateway
from tests.support.chart import CHART, Refused, Rendered, render

UMBRELLA = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
DEPENDENCY = {"name": "paddock", "version": gateway.__version__, "repository": "", "alias": "llm"}

Umbrella = Callable[..., Rendered]


@pytest.fixture
def umbrella(tmp_path: Path) -> Umbrella:
    """Return a function: values of the dependency -> what the umbrella chart renders."""

    def rendered(values: dict[str, Any], *, has_condition: bool = True) -> Rendered:
        dependency = {**DEPENDENCY, **({"condition": "llm.enabled"} if has_condition else {})}
        (tmp_path / "Chart.yaml").write_text(json.dumps({**UMBRELLA, "dependencies": [dependency]}))
        shutil.copytree(CHART, tmp_path / "charts" / "paddock", dirs_exist_ok=True)
        return render({"llm": values}, chart=tmp_path)

    return rendered


@pytest.mark.parametrize("values", [{}, {"enabled": True}])
def test_an_umbrella_chart_turns_it_on(umbrella: Umbrella, values: dict[str, Any]) -> None:
    found = umbrella(values)
    assert found.one("Deployment", "gateway")["metadata"]["name"] == "p-llm-gateway"


def test_an_umbrella_chart_turns_it_off(umbrella: Umbrella) -> None:
    assert umbrella({"enabled": False}).objects == ()


def test_off_without_a_condition_is_told(umbrella: Umbrella) -> None:
    with pytest.raises(Refused, match=r"enabled: false leaves nothing out unless .*`condition: paddock\.enabled`"):
        umbrella({"enabled": False}, has_condition=False)


def test_an_umbrella_charts_values_are_checked_too(umbrella: Umbrella) -> None:
    with pytest.raises(Refused, match="additional properties 'enable' not allowed"):
        umbrella({"enable": True})
    with pytest.raises(Refused, match="models: null leaves nothing to serve"):
        umbrella({"models": None})
