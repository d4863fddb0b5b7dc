"""The shipped rules, by Prometheus' own tool: they are sound, and each alert fires when it should and only then."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.monitoring.alert_cases import CASES, Case
from tests.support.prometheus import program, replaced

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "helm" / "files" / "rules"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
DOCKER = ROOT / "docs" / "docker.md"
SEVERITIES = {"page", "ticket"}
MOST_PAGES = 5


def groups_of(file: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((RULES / file).read_text())["groups"]
    return groups


ALERTS = {rule["alert"]: rule for group in groups_of("alerts.yaml") for rule in group["rules"]}
GROUP = {rule["alert"]: str(group["name"]) for group in groups_of("alerts.yaml") for rule in group["rules"]}
TOGETHER = {
    f"{group}-{every}": cases
    for group in dict.fromkeys(GROUP.values())
    for every in ("1m", "5m")
    if (cases := tuple(case for case in CASES if GROUP[case.alert] == group and case.every == every))
}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=110)


def as_test(case: Case) -> dict[str, object]:
    """In the form of promtool's files."""
    alert = ALERTS[case.alert]
    expected = {
        "exp_labels": {"severity": alert["labels"]["severity"], **case.labels},
        "exp_annotations": {**alert["annotations"], "summary": case.summary},
    }
    looked = {"eval_time": case.at, "alertname": case.alert, "exp_alerts": [expected] if case.summary else []}
    return {
        "interval": case.every,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [looked],
    }


def run_cases(cases: tuple[Case, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Cases of one `every` and one group of alerts; other groups are left out, which is quicker."""
    name = GROUP[cases[0].alert]
    alerts = folder / "alerts.yaml"
    alerts.write_text(
        yaml.safe_dump({"groups": [group for group in groups_of("alerts.yaml") if group["name"] == name]})
    )
    recorded = [str(RULES / "recording.yaml")] if name == "paddock-objectives" else []
    document = {
        "rule_files": [*recorded, str(alerts)],
        "evaluation_interval": cases[0].every,
        "tests": [as_test(case) for case in cases],
    }
    file = folder / "cases.yaml"
    file.write_text(yaml.safe_dump(document))
    return promtool("test", "rules", str(file))


def test_every_case_is_run() -> None:
    assert sum(len(cases) for cases in TOGETHER.values()) == len(CASES)


def test_the_rules_are_sound() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *map(str, sorted(RULES.glob("*.yaml"))))
    assert done.returncode == 0, done.stdout + done.stderr


def _sound(folder: Path) -> str:
    """Return the configuration with files that are there in place of the container's."""
    key_file = folder / "metrics_key"
    key_file.write_text("mk-0123456789")
    return replaced(CONFIG.read_text(), {"/etc/prometheus/rules": str(RULES), "/tmp/metrics_key": str(key_file)})


def test_the_configuration_is_sound(tmp_path: Path) -> None:
    file = tmp_path / "prometheus.yml"
    file.write_text(_sound(tmp_path))
    done = promtool("check", "config", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout


def test_an_alertmanager_is_added_as_the_page_says(tmp_path: Path) -> None:
    snippet = re.findall(r"```yaml\n(alerting:\n.+?)```", DOCKER.read_text(), re.DOTALL)[0]
    file = tmp_path / "prometheus.yml"
    file.write_text(_sound(tmp_path) + snippet)
    done = promtool("check", "config", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER)
def test_each_alert_fires_and_stays_silent(cases: tuple[Case, ...], tmp_path: Path) -> None:
    done = run_cases(cases, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_can_fail(tmp_path: Path) -> None:
    loud = next(case for case in CASES if case.summary)
    quiet = next(case for case in CASES if case.alert == loud.alert and not case.summary)
    assert loud.every == quiet.every == "1m"
    swapped = (Case(loud.alert, loud.at, loud.series), Case(loud.alert, loud.at, quiet.series, loud.summary))
    for case in swapped:
        assert run_cases((case,), tmp_path).returncode != 0


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_has_both_cases(name: str) -> None:
    told = {bool(case.summary) for case in CASES if case.alert == name}
    assert told == {True, False}


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_says_what_and_where(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in SEVERITIES
    annotations = alert["annotations"]
    assert set(annotations) == {"summary", "description", "board", "runbook_url"}
    assert annotations["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    board = ROOT / "helm" / "files" / "dashboards" / f"{annotations['board'].removeprefix('paddock-')}.json"
    assert board.is_file()
    assert annotations["description"].endswith(".")


def test_few_alerts_wake_anybody() -> None:
    pages = [name for name, alert in ALERTS.items() if alert["labels"]["severity"] == "page"]
    assert 0 < len(pages) <= MOST_PAGES


def test_the_runbook_has_a_chapter_for_each_alert_and_no_other() -> None:
    chapters = re.findall(r"^### (Paddock\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(chapters) == sorted(ALERTS)
    for name, alert in ALERTS.items():
        text = RUNBOOK.read_text().split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert f"**{alert['labels']['severity']}**" in text, name
        for part in ("Users notice", "Look first", "Causes", "Remedy", "Leave it"):
            assert f"**{part}.**" in text, (name, part)


def test_objectives_are_told_in_the_runbook() -> None:
    objectives = {rule["record"]: rule["expr"] for rule in groups_of("recording.yaml")[0]["rules"]}
    told = RUNBOOK.read_text()
    for name, expr in objectives.items():
        share = float(str(expr).removeprefix("vector(").removesuffix(")"))
        assert f"| `{name}` | {share * 100:g} % |" in told
