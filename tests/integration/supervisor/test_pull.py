"""`paddock models pull` as an init container runs it, against a hub on loopback."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hub_server import TOKEN, Hub
from tests.support.preloaded import run
from tests.support.stack import DEMO_MODEL
from workers.commands.command import TERMINATED
from workers.models.files import first_part
from workers.protocol.exits import Exit

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
LARGE = GGUF + bytes(25 << 20)
"""More than the library holds back before it writes."""
PARTS = {f"big/m-BF16-0000{n}-of-00002.gguf": GGUF + bytes([n]) * 1000 for n in (1, 2)}
REPOSITORIES = {
    "owner/model-GGUF": {"m-Q4_K_M.gguf": LARGE, "m-Q8_0.gguf": GGUF + b"q8", **PARTS},
    "owner/locked": {"m-Q8_0.gguf": GGUF},
}
PULL = (sys.executable, "-m", "gateway.cli", "models", "pull")
CATALOG = """
models:
  - {name: small, hf: "owner/model-GGUF:Q8_0"}
  - {name: team/large, hf: "owner/model-GGUF:BF16"}
  - {name: here, path: here.gguf}
  - {name: elsewhere, hf: "owner/nothing", workers: 0}
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(REPOSITORIES, gated=frozenset({"owner/locked"})) as served:
        yield served


@dataclass(slots=True)
class Machine:
    """Where `paddock models pull` runs: the folder is a volume, the rest is new each time."""

    hub: Hub
    volume: Path

    def environment(self, **settings: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PADDOCK_"))}
        clean |= self.hub.environment | {"HOME": str(self.volume.parent / "home")}
        clean |= {"PADDOCK_STATE_DIR": str(self.volume.parent / "state"), "PADDOCK_MODELS_DIR": str(self.volume)}
        return clean | {name: value for name, value in settings.items() if value}

    def start(self, *flags: str, **settings: str) -> subprocess.Popen[str]:
        pipe, environment = subprocess.PIPE, self.environment(**settings)
        return subprocess.Popen([*PULL, *flags], env=environment, stdout=pipe, stderr=pipe, text=True)

    def fetch(self, *flags: str, **settings: str) -> tuple[int, dict[str, Path], str]:
        """Its exit code, the files it named, and its complaint."""
        done = run([*PULL, *flags], self.environment(**settings))
        rows = [line.split("\t") for line in done.out.splitlines()]
        return done.code, {name: Path(path) for name, path in rows}, done.err


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path / "models")


def downloads(hub: Hub) -> list[str]:
    return [line for line in hub.requests if line.startswith("GET") and "/resolve/" in line]


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "not within 30 s"
        time.sleep(0.01)


def test_a_catalog_is_fetched_once_under_the_models_names(machine: Machine, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(CATALOG)
    (tmp_path / "here.gguf").write_bytes(GGUF)
    code, files, complaint = machine.fetch("--catalog", str(tmp_path / "models.yaml"))
    assert code == 0, complaint
    first = machine.volume / "team--large-00001-of-00002.gguf"
    assert files == {"small": machine.volume / "small.gguf", "team/large": first, "here": machine.volume / "here.gguf"}
    assert files["small"].read_bytes() == GGUF + b"q8"
    assert first.read_bytes() == PARTS["big/m-BF16-00001-of-00002.gguf"]
    assert (machine.volume / "team--large-00002-of-00002.gguf").read_bytes() == PARTS["big/m-BF16-00002-of-00002.gguf"]
    # A worker is told the plain name, before anybody knows of parts.
    assert first_part(machine.volume / "team--large.gguf") == first
    assert first_part(files["small"]) == files["small"]

    hub.requests.clear()
    assert machine.fetch("--catalog", str(tmp_path / "models.yaml")) == (0, files, "")
    assert hub.requests == []


def test_a_draft_model_comes_with_its_model(machine: Machine, hub: Hub) -> None:
    drafted = '{"draft": {"hf": "owner/model-GGUF:BF16"}}'
    flags = ("--hf", "owner/model-GGUF:Q8_0", "--alias", "team/m", "--speculation", drafted)
    code, files, complaint = machine.fetch(*flags)
    assert code == 0, complaint
    first = machine.volume / "team--m.draft-00001-of-00002.gguf"
    assert files == {"team/m": machine.volume / "team--m.gguf", "team/m.draft": first}
    assert first.read_bytes() == PARTS["big/m-BF16-00001-of-00002.gguf"]
    assert first_part(machine.volume / "team--m.draft.gguf") == first
    hub.requests.clear()
    assert machine.fetch(*flags) == (0, files, "")
    assert hub.requests == []


def test_a_part_that_was_lost_is_fetched_again(machine: Machine, hub: Hub) -> None:
    _, files, _ = machine.fetch("--hf", "owner/model-GGUF:BF16", "--alias", "m")
    (machine.volume / "m-00002-of-00002.gguf").resolve().unlink()
    hub.requests.clear()
    code, again, complaint = machine.fetch("--hf", "owner/model-GGUF:BF16", "--alias", "m")
    assert (code, again) == (0, files), complaint
    assert len(downloads(hub)) == 1


def test_a_new_choice_takes_the_names_place(machine: Machine) -> None:
    for quant, content in (("Q8_0", GGUF + b"q8"), ("Q4_K_M", LARGE)):
        code, files, complaint = machine.fetch("--alias", "m", PADDOCK_HF=f"owner/model-GGUF:{quant}")
        assert code == 0, complaint
        assert files["m"] == machine.volume / "m.gguf"
        assert files["m"].read_bytes() == content


def test_without_a_word_it_is_the_demo(machine: Machine, hub: Hub) -> None:
    code, files, _ = machine.fetch()
    assert code == 0
    assert files["paddock-demo"].resolve() == DEMO_MODEL.resolve()
    assert hub.requests == []


@pytest.mark.parametrize(
    ("alias", "files"),
    [
        ("", ["paddock-demo.gguf"]),
        ("mine", ["mine.gguf"]),
        ("team/mine:8b", ["team--mine--8b.gguf"]),
        ("mine", ["mine-00001-of-00002.gguf", "mine-00002-of-00002.gguf"]),
    ],
)
def test_a_file_of_ones_own_is_the_model_where_none_is_named(
    machine: Machine, hub: Hub, alias: str, files: list[str]
) -> None:
    machine.volume.mkdir()
    for file in files:
        (machine.volume / file).write_bytes(GGUF)
    for _ in range(2):
        code, found, complaint = machine.fetch(PADDOCK_ALIAS=alias)
        assert (code, found) == (0, {alias or "paddock-demo": machine.volume / files[0]}), complaint
    assert {path.name for path in machine.volume.iterdir() if path.suffix == ".gguf"} == set(files)
    assert all(not (machine.volume / file).is_symlink() for file in files)
    assert hub.requests == []


def test_a_link_of_an_earlier_choice_is_no_file_of_ones_own(machine: Machine) -> None:
    assert machine.fetch("--hf", "owner/model-GGUF:Q8_0", "--alias", "m")[0] == 0
    code, files, complaint = machine.fetch("--alias", "m")
    assert code == 0, complaint
    assert files["m"].resolve() == DEMO_MODEL.resolve()


def test_a_file_of_ones_own_is_in_the_way_of_a_model_that_is_named(machine: Machine) -> None:
    machine.volume.mkdir()
    (machine.volume / "mine.gguf").write_bytes(GGUF)
    code, files, complaint = machine.fetch("--hf", "owner/model-GGUF:Q8_0", "--alias", "mine")
    assert (code, files) == (Exit.BAD_MODEL, {})
    assert "is a file that `paddock models pull` has not made" in complaint
    assert (machine.volume / "mine.gguf").read_bytes() == GGUF


def test_a_file_of_ones_own_is_looked_at_like_any_other(machine: Machine) -> None:
    machine.volume.mkdir()
    (machine.volume / "mine.gguf").write_bytes(b"GGML, of long ago")
    code, files, complaint = machine.fetch("--alias", "mine")
    assert (code, files) == (Exit.BAD_MODEL, {})
    assert "mine.gguf is not a GGUF file" in complaint


def test_a_token_in_the_environment_opens_a_gated_repository(machine: Machine) -> None:
    code, _, complaint = machine.fetch("--hf", "owner/locked")
    assert code == Exit.BAD_MODEL
    assert "is gated: accept its terms" in complaint
    assert machine.fetch("--hf", "owner/locked", HF_TOKEN=TOKEN)[1]["locked"].read_bytes() == GGUF


def test_what_was_spoilt_meanwhile_is_not_served(machine: Machine, hub: Hub) -> None:
    blobs = machine.volume / "models--owner--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(LARGE).hexdigest()}.part").write_bytes(b"spoilt")
    code, files, complaint = machine.fetch("--hf", "owner/model-GGUF")
    assert (code, files) == (Exit.BAD_MODEL, {})
    assert "is not the file that the hub describes" in complaint
    assert machine.fetch("--hf", "owner/model-GGUF")[0] == 0


def test_an_end_in_the_middle_costs_what_was_missing(machine: Machine, hub: Hub) -> None:
    def came() -> int:
        return sum(part.stat().st_size for part in machine.volume.rglob("*.part"))

    hub.pause_after = 15 << 20
    broken_off = machine.start("--hf", "owner/model-GGUF")
    until(lambda: hub.paused and came() > 0)
    broken_off.send_signal(signal.SIGTERM)
    broken_off.communicate(timeout=10)
    assert broken_off.returncode == TERMINATED, "who waits for it must not take it for done"
    assert not (machine.volume / "model.gguf").exists()
    kept = came()

    hub.pause_after = 0
    hub.requests.clear()
    code, files, complaint = machine.fetch("--hf", "owner/model-GGUF")
    assert code == 0, complaint
    assert files["model"].read_bytes() == LARGE
    assert hub.ranges == [f"bytes={kept}-"]


def test_a_download_without_end_is_given_up(machine: Machine, hub: Hub) -> None:
    hub.pause_after = 100
    started = time.monotonic()
    code, files, complaint = machine.fetch("--hf", "owner/model-GGUF", "--fetch-timeout-s", "3")
    assert (code, files) == (Exit.BAD_MODEL, {})
    assert "owner/model-GGUF was not fetched within 3 s (fetch_timeout_s); what has come is kept" in complaint
    assert time.monotonic() - started < 20


def test_two_at_once_on_one_volume_fetch_once(machine: Machine, hub: Hub) -> None:
    both = [machine.start("--hf", "owner/model-GGUF", "--alias", "m") for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len({out for out, _ in said}) == 1
    assert len(downloads(hub)) == 1


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"PADDOCK_HF": "owner/nothing"}, Exit.BAD_MODEL, "could not fetch owner/nothing"),
        ({"PADDOCK_HF": "owner/model-GGUF:Q2_K"}, Exit.BAD_MODEL, "has no file for 'Q2_K'; it has:"),
        ({"PADDOCK_CATALOG": "missing.yaml"}, Exit.USAGE, "missing.yaml"),
        ({"PADDOCK_HF": "a/b", "PADDOCK_MODEL": "c.gguf"}, Exit.USAGE, "--model and --hf each say what to serve"),
        ({"PADDOCK_MODEL": "missing.gguf"}, Exit.BAD_MODEL, "missing.gguf; check the path"),
        (
            {"PADDOCK_HF": "owner/model-GGUF", "PADDOCK_MODELS_DIR": "/proc/models"},
            Exit.BAD_MODEL,
            "could not keep owner/model-GGUF in /proc/models: ",
        ),
        ({"PADDOCK_MODELS_DIR": "/proc/models"}, Exit.USAGE, "models_dir: /proc/models: "),
    ],
)
def test_says_in_a_line_what_is_wrong(machine: Machine, settings: dict[str, str], code: Exit, said: str) -> None:
    ended, files, complaint = machine.fetch(**settings)
    assert (ended, files) == (code, {})
    assert said in complaint
    assert "Traceback" not in complaint
