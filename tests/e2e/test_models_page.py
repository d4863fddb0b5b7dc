"""docs/models.md as readers meet it: its catalogs and commands are run by real processes, and its answers compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.program import Program
from tests.support.stack import DEMO_MODEL, ROOT, SHARED_MODELS, Stack
from workers.models.catalog import convert

PAGE = (ROOT / "docs" / "models.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INDENTED = [line.strip() for line in re.findall(r"^ {4}(\S.*)$", re.sub(r"(?ms)^```.*?^```$", "", PAGE), re.MULTILINE)]
COMMANDS = [line for line in INDENTED if line.startswith("curl ")]
PINGS = [line for line in INDENTED if line.startswith(": ")]
EVENTS = [json.loads(line.removeprefix("data: ")) for line in INDENTED if line.startswith("data: ")]
PING = re.compile(r": waiting position=\d+ for=worker(?: loading(?:=\d+%)?)?")
LOADED_S = 240.0
LISTENED_S = 2.0


def fenced(language: str) -> list[str]:
    return [text for name, text in FENCED if name == language]


def test_every_example_is_looked_at_here() -> None:
    """Those in Python, and what they print, are run by tests/unit/workers/residency/test_explain.py."""
    known = ("curl ", ": waiting", "data: ", "paddock models plan ")
    assert [line for line in INDENTED if not line.startswith(known)] == []
    assert {name for name, _ in FENCED} == {"", "yaml", "python", "text"}
    assert len(fenced("")) == 1, "the plan"
    assert COMMANDS
    assert PINGS
    assert EVENTS


@pytest.mark.parametrize("text", fenced("yaml"))
def test_catalogs_are_taken(text: str) -> None:
    assert convert(yaml.safe_load(text), "models.yaml").models


def test_the_plan_is_printed_as_on_the_page(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [command] = [line for line in INDENTED if line.startswith("paddock ")]
    (tmp_path / "models.yaml").write_text(
        f"models: [{{name: paddock-demo, path: '{DEMO_MODEL}', workers: 2, ctx: 1024}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    done = Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(tmp_path / "state")}).run(
        command.removeprefix("paddock ")
    )
    assert (done.code, done.err) == (0, "")
    assert shape(done.out) == shape(fenced("")[0])


def shape(table: str) -> list[str]:
    """Return lines with one mark for each number and each stretch of blanks: sizes are the machine's."""
    return [re.sub(r"\s+", " ", re.sub(r"[\d,]*\d", "#", line)) for line in table.strip().splitlines()]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A supervisor and a gateway with the first catalog of the page, whose files are there."""
    with Stack() as running:
        catalog = running.folder / "models.yaml"
        catalog.write_text(fenced("yaml")[0])
        for model in yaml.safe_load(fenced("yaml")[0])["models"]:
            (running.folder / model["path"]).symlink_to(SHARED_MODELS / "stories260K.gguf")
        settings = {"PADDOCK_CATALOG": str(catalog), "PADDOCK_CACHE_RAM_MIB": "64"}
        command = [sys.executable, "-m", "gateway.cli", "supervisor"]
        running.spawn("supervisor", command, settings, "supervisor")
        running.gateway(catalog=catalog, ping_interval_s=0.1, start_timeout_s=LOADED_S)
        yield running


def shell(stack: Stack, command: str) -> str:
    """Run a command as it stands on the page. A stream of news is listened to for a while."""
    environment = {**os.environ, "URL": stack.gateways[0].url, "AUTH": f"Authorization: Bearer {stack.key}"}
    listens = command.endswith('/models/sse"')
    text = f"timeout {LISTENED_S} {command}" if listens else command
    done = subprocess.run(["bash", "-euc", text], env=environment, capture_output=True, text=True, timeout=LOADED_S)
    assert done.returncode == (124 if listens else 0), (command, done.stderr, done.stdout)
    return done.stdout


def status(stack: Stack, model: str) -> Any:
    return json.loads(shell(stack, f'curl -sSfH "$AUTH" "$URL/v1/models/{model}"'))["status"]


def until_status(stack: Stack, model: str, value: str) -> Any:
    ends = time.monotonic() + LOADED_S
    while (found := status(stack, model))["value"] != value:
        assert time.monotonic() < ends, found
        time.sleep(0.1)
    return found


@pytest.mark.timeout(600)
def test_the_commands_do_what_the_page_says(stack: Stack) -> None:
    calling, showing, loading, listening, unloading, explaining = COMMANDS
    until_status(stack, "small", "loaded")
    assert status(stack, "coder")["value"] == "unloaded"

    lines = [line for line in shell(stack, calling).splitlines() if line]
    waited = [line for line in lines if line.startswith(": ")]
    assert waited
    waited = [line for line in waited if line != ": ping"]  # the model is there, and computes
    assert [line for line in waited + PINGS if not PING.fullmatch(line)] == []
    assert lines[-1] == "data: [DONE]"
    assert json.loads(shell(stack, showing))["status"] == {"value": "loaded"}

    assert json.loads(shell(stack, loading)) == {"success": True}
    until_status(stack, "writer", "loaded")
    assert until_status(stack, "coder", "unloaded")["value"] == "unloaded", "models_max is 2"

    events = [
        json.loads(line.removeprefix("data: ")) for line in shell(stack, listening).splitlines() if line[:1] == "d"
    ]
    assert {event["model"]: event["data"]["status"] for event in events} == {
        "small": "loaded",
        "coder": "unloaded",
        "writer": "loaded",
    }
    assert {frozenset(event) for event in EVENTS} == {frozenset(event) for event in events}

    assert json.loads(shell(stack, unloading)) == {"success": True}
    until_status(stack, "writer", "unloaded")
    told = json.loads(shell(stack, explaining))["residency"]
    assert (told["status"], len(told["machines"])) == ("unloaded", 1)
    assert {"why", "is_hopeless", "progress"} <= told.keys()
