"""`paddock up --models-dir`: a folder is served as it is, its models are loaded by calls, and it may change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest
import redis

from tests.integration.supervisor.conftest import Programs, wait_until
from tests.integration.supervisor.test_residents import Crowd, states
from tests.integration.supervisor.test_station import beats
from tests.integration.supervisor.test_up import ask, assert_nothing_left, port_of
from tests.support import adapter_files
from tests.support.program import Program as Commands
from tests.support.projectors import write_pair
from tests.support.redis_server import RedisServer
from tests.support.stack import DEMO_MODEL
from workers.llama.gguf import read_header
from workers.models.folder.contents import HeaderFacts
from workers.models.folder.folder import read_facts
from workers.protocol.exits import Exit

KEY = "pk-folder"
SETTINGS = ("--slots", "1", "--ctx", "128")


@pytest.fixture
def paddock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(tmp_path / "state")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One of everything."""
    made = tmp_path / "models"
    (made / "vl").mkdir(parents=True)
    shutil.copy(DEMO_MODEL, made / "Fox Stories.gguf")
    adapter_files.sound(made / "pirate.gguf", read_header(DEMO_MODEL))
    write_pair(made / "vl", "qwen2vl")
    whole = DEMO_MODEL.read_bytes()
    (made / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (made / "split-00001-of-00002.gguf").write_bytes(whole)  # as its header has it, all of it
    (made / "page.gguf").write_text("<html>")
    return made


def test_headers_are_read_by_a_process_that_may_end(folder: Path) -> None:
    paths = sorted(folder.glob("*.gguf"))
    facts = {path.name: one for path, one in read_facts(paths).items()}
    assert facts["Fox Stories.gguf"] == HeaderFacts()
    assert facts["pirate.gguf"] == HeaderFacts(kind="adapter")
    assert facts["cut.gguf"].fault.startswith("truncated: ")
    assert facts["page.gguf"].fault.startswith("not a GGUF file")
    (projector,) = read_facts([folder / "vl" / "mmproj-qwen2vl.gguf"]).values()
    assert projector.kind == "projector"
    odd = folder / os.fsdecode(b"odd \xff name.gguf")
    shutil.copy(DEMO_MODEL, odd)
    assert read_facts([odd, folder / "Fox Stories.gguf"])[odd].fault == "its name is odd; rename it"


def test_a_folder_is_served_and_followed(programs: Programs, folder: Path) -> None:
    up = programs.start("up", "--models-dir", str(folder), "--port", "0", *SETTINGS, PADDOCK_API_KEY=KEY)
    up.until("Ctrl-C")
    told = up.text()
    assert f"served from {folder}: Fox-Stories, qwen2vl-text, split" in told
    assert f"{folder}/pirate.gguf is not served: a LoRA adapter and no model" in told
    assert f"{folder}/cut.gguf is not served: truncated" in told
    port = port_of(up)

    def listed() -> dict[str, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/models", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return {model["id"]: model["status"]["value"] for model in json.load(answer)["data"]}

    assert listed() == dict.fromkeys(("Fox-Stories", "qwen2vl-text", "split"), "unloaded")
    assert ask(port, KEY, "Fox-Stories") in ("stop", "length")
    assert listed()["Fox-Stories"] == "loaded"
    (folder / "cut.gguf").write_bytes(DEMO_MODEL.read_bytes())
    (folder / "split-00001-of-00002.gguf").unlink()
    wait_until(lambda: listed().keys() == {"Fox-Stories", "qwen2vl-text", "cut"}, up.text)
    assert ask(port, KEY, "cut") in ("stop", "length")
    assert f"also served from {folder}: cut" in up.text()
    assert f"no longer in {folder}: split" in up.text()
    assert up.stop(signal.SIGTERM) == 0, up.text()
    assert_nothing_left(up)


def test_a_supervisor_serves_and_follows_a_folder(
    programs: Programs, folder: Path, server: RedisServer, client: redis.Redis
) -> None:
    station = programs.start(
        "supervisor",
        *("--models-dir", str(folder), *SETTINGS),
        PADDOCK_REDIS_URL=server.url,
        PADDOCK_WORKER_SECRET="shared",
    )
    wait_until(lambda: states(client).keys() == {"Fox-Stories", "qwen2vl-text", "split"}, station.text)
    assert f"served from {folder}: Fox-Stories, qwen2vl-text, split" in station.text()
    assert f"{folder}/pirate.gguf is not served: a LoRA adapter and no model" in station.text()
    crowd = Crowd(client)
    crowd.wait_for("Fox-Stories")

    def is_loaded() -> bool:
        crowd.tell()
        return bool(beats(server, "Fox-Stories"))

    wait_until(is_loaded, station.text)
    (folder / "split-00001-of-00002.gguf").unlink()
    wait_until(lambda: "split" not in states(client), station.text)
    assert station.stop(signal.SIGTERM) == 0, station.text()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))


def test_what_lies_in_the_folder_is_listed_shown_and_planned(folder: Path, paddock: Commands) -> None:
    listed = json.loads(paddock.run(f"models list --models-dir '{folder}' --json").out)
    named = {row["name"]: row["in_catalog_as"] for row in listed["models"]}
    assert named == {
        "Fox Stories.gguf": ["Fox-Stories"],
        "vl/qwen2vl-text.gguf": ["qwen2vl-text"],
        "vl/mmproj-qwen2vl.gguf": ["qwen2vl-text (projector)"],
        "split-00001-of-00002.gguf": ["split"],
        **{name: [] for name in ("pirate.gguf", "cut.gguf", "page.gguf")},
    }
    shown = json.loads(paddock.run(f"models show qwen2vl-text --models-dir '{folder}' --json").out)
    assert shown["beside"]["projector"] == [str(folder / "vl" / "mmproj-qwen2vl.gguf")]
    (folder / "split-00001-of-00002.gguf").unlink()
    plan = json.loads(paddock.run(f"models plan --models-dir '{folder}' --slots 1 --ctx 128 --json").out)
    assert [(worker["model"], worker["fits"]) for worker in plan["workers"]] == [
        ("Fox-Stories", True),
        ("qwen2vl-text", True),
    ]


def test_an_empty_folder_is_listed_and_not_planned(tmp_path: Path, paddock: Commands) -> None:
    (tmp_path / "empty").mkdir()
    listed = paddock.run(f"models list --models-dir {tmp_path / 'empty'}")
    assert (listed.code, "paddock-demo" in listed.out) == (0, False)
    later = paddock.run(f"models list --models-dir {tmp_path / 'later'}")
    assert (later.code, later.err) == (0, ""), "the first model that is fetched makes it"
    planned = paddock.run(f"models plan --models-dir {tmp_path / 'empty'}")
    assert (planned.code, "has no model (0 other GGUF files); put GGUF files there" in planned.err) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--models-dir", "nowhere"), "nowhere: No such file or directory; name a folder of GGUF files"),
        (("--models-dir", "docs"), "has no model (0 other GGUF files); put GGUF files there"),
        (("--models-dir", "docs", "--alias", "x"), "alias: models_dir serves many models"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_runs(
    programs: Programs, args: tuple[str, ...], message: str
) -> None:
    up = programs.start("up", *args)
    assert up.wait() == Exit.USAGE
    assert message in up.text()
