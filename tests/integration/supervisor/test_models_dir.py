"""`paddock up --models-dir`: a folder is served as it is, its models are loaded by calls, and it may change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.integration.supervisor.conftest import Programs, wait_until
from tests.integration.supervisor.test_up import ask, assert_nothing_left, port_of
from tests.support import adapter_files
from tests.support.projectors import write_pair
from tests.support.stack import DEMO_MODEL
from workers.llama.gguf import read_header
from workers.models.folder.contents import HeaderFacts
from workers.models.folder.folder import read_facts
from workers.protocol.exits import Exit

KEY = "pk-folder"
SETTINGS = ("--slots", "1", "--ctx", "128")


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
