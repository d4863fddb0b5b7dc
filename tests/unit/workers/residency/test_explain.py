"""Decisions are explained as data and as sentences, as docs/models.md shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.unit.workers.residency.pictures import NOW, model, picture, waits, worker
from workers.models.catalog import convert
from workers.residency.decide import decide
from workers.residency.explain import as_data, sentences

PAGE = Path(__file__).resolve().parents[4] / "docs" / "models.md"


def test_the_example_of_the_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    chapter = PAGE.read_text().partition("## How residency is decided")[2]
    shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", chapter, re.DOTALL)
    assert shown is not None
    exec(compile(shown[1], str(PAGE), "exec"), {})
    assert capsys.readouterr().out == shown[2]


def test_the_catalog_of_the_page_says_what_the_page_says() -> None:
    """`small` stays, the others are loaded by their calls, and two fit at once."""
    [text] = re.findall(r"```yaml\n(models:.*?)```", PAGE.read_text(), re.DOTALL)
    found = convert(yaml.safe_load(text), "the page")
    policies = {model.name: model.policy for model in found.models}
    assert {name for name, policy in policies.items() if policy.stays} == {"small"}
    assert (policies["coder"].ttl_s, policies["writer"].most, found.models_max) == (600, 1, 2)


def test_a_decision_as_data() -> None:
    shown = picture(
        [model("a"), model("b"), model("c", autoload=False)],
        [worker("a1", 20, calls=2)],
        [waits("b", 40), waits("c")],
    )
    data = as_data(shown, decide(shown, NOW))
    assert json.loads(json.dumps(data)) == data
    assert data["devices"][0]["workers"] == {"a1": 20 << 30}
    assert data["devices"][0]["free_bytes"] == 4 << 30
    assert [(each["action"], each["model"]) for each in data["actions"]] == [
        ("wait", "c"),
        ("reserve", "a"),
        ("wait", "b"),
    ]
    assert [each["is_hopeless"] for each in data["actions"] if each["action"] == "wait"] == [True, False]


@pytest.mark.parametrize(
    ("status", "calls", "said"),
    [
        ("loading", 0, "a 20.0 GiB (loading for 500 s)"),
        ("ready", 0, "a 20.0 GiB (idle for 100 s)"),
        ("ready", 1, "a 20.0 GiB (1 call)"),
        ("reserved", 2, "a 20.0 GiB (reserved, 2 calls)"),
        ("draining", 0, "a 20.0 GiB (leaving, idle for 100 s)"),
    ],
)
def test_what_a_worker_does_is_told(status: str, calls: int, said: str) -> None:
    shown = picture([model("a")], [worker("a1", 20, status=status, calls=calls)])  # type: ignore[arg-type]
    told = sentences(shown, decide(shown, NOW), NOW)
    assert told[0].endswith(said)


def test_each_kind_of_action_has_its_sentence() -> None:
    shown = picture(
        [model("a"), model("b", 2), model("c", 22)],
        [worker("a1", calls=1), worker("d1", 4, calls=1), worker("b1", 2), worker("b2", 2)],
        [waits("c", 40)],
    )
    told = sentences(shown, decide(shown, NOW), NOW)[2:]
    assert told[0].startswith("Let the calls of d (d1) end: ")
    assert told[1].startswith("Stop b (b1), which frees 2.0 GiB on gpu0: b may have at most 1 workers")
    assert told[-1].startswith("c waits: memory for c on m is being freed by a, b, d; calls of a, d end first.")
    assert any(line.startswith("Give a (a1) no more calls: ") for line in told)
    assert all(line.endswith(".") for line in told)
