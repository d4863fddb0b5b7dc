"""`paddock models` as a person runs it, against a hub on loopback."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.support.hub_server import COMMIT, Hub
from tests.support.preloaded import Ended, run
from tests.support.stack import DEMO_MODEL
from workers.models.fetched import Fetched
from workers.models.spec import ModelSpec
from workers.protocol.exits import Exit
from workers.settings import WorkerSettings
from workers.supervisor.state_folder import StateFolder
from workers.worker import spec_of

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
BIG = GGUF + bytes(3 << 20)
REPOSITORIES = {
    "owner/seeing-GGUF": {"m-Q4_K_M.gguf": BIG, "m-Q8_0.gguf": GGUF + b"q8", "mmproj-m-f16.gguf": GGUF + b"eyes"},
    "owner/plain": {"p-Q8_0.gguf": GGUF + b"plain"},
    "owner/demo": {"demo-F16.gguf": DEMO_MODEL.read_bytes()},
    "owner/lora": {"pirate-F16.gguf": GGUF + b"pirate"},
}


class Done(Ended):
    @property
    def files(self) -> dict[str, Path]:
        return {name: Path(path) for name, path in (line.split("\t") for line in self.out.splitlines())}


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with a models folder, a state folder, and perhaps a catalog."""

    hub: Hub
    folder: Path

    @property
    def volume(self) -> Path:
        return self.folder / "models"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def environment(self, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PADDOCK_"))}
        clean |= self.hub.environment | {"HOME": str(self.folder / "home")}
        return clean | {"PADDOCK_STATE_DIR": str(self.state), "PADDOCK_MODELS_DIR": str(self.volume)} | more

    def run(self, *words: str, **variables: str) -> Done:
        done = run([sys.executable, "-m", "gateway.cli", "models", *words], self.environment(**variables))
        return Done(done.code, done.out, done.err)

    def catalog(self, *models: str) -> str:
        file = self.folder / "models.yaml"
        file.write_text("models:\n" + "".join(f"  - {model}\n" for model in models))
        return str(file)

    def downloads(self) -> list[str]:
        return [line.rpartition("/")[2] for line in self.hub.requests if line.startswith("GET") and "/resolve/" in line]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(REPOSITORIES) as served:
        yield served


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    hub.requests.clear()
    return Machine(hub, tmp_path)


def test_an_adapter_of_the_hub_comes_with_its_model(machine: Machine) -> None:
    file = machine.catalog('{name: m, hf: owner/plain, adapters: [{name: a/pirate, hf: "owner/lora:F16"}]}')
    done = machine.run("pull", "--catalog", file)
    assert done.code == 0, done.err
    link = machine.volume / "m.adapter.a--pirate.gguf"
    assert done.files == {"m": machine.volume / "m.gguf", "m.adapter.a--pirate": link}
    assert link.read_bytes() == GGUF + b"pirate"
    machine.hub.requests.clear()
    assert machine.run("pull", "--catalog", file) == Done(0, done.out, "")
    assert machine.hub.requests == []
    alone = WorkerSettings(
        model=machine.volume / "m.gguf",
        adapters='[{"name": "a/pirate", "hf": "owner/lora:F16"}]',
        redis_url="redis://r",
        worker_secret="s" * 32,
    )
    assert [adapter.path for adapter in spec_of(alone).adapters] == [str(link)]


def test_an_adapter_has_one_source(machine: Machine) -> None:
    file = machine.catalog("{name: m, hf: owner/plain, adapters: [{name: a, path: a.gguf, hf: owner/lora}]}")
    done = machine.run("pull", "--catalog", file)
    assert done.code == Exit.USAGE
    assert "give exactly one source: `path` (a GGUF file) or `hf`" in done.err
    assert "models[0] (m): adapters[0]: " in done.err


def test_a_draft_and_an_adapter_bring_no_projector(machine: Machine) -> None:
    seeing = '"owner/seeing-GGUF:Q8_0"'
    speculation, adapters = f"speculation: {{draft: {{hf: {seeing}}}}}", f"adapters: [{{name: a, hf: {seeing}}}]"
    file = machine.catalog(f"{{name: m, hf: owner/plain, {speculation}, {adapters}}}")
    assert machine.run("pull", "--catalog", file).code == 0
    assert machine.downloads() == ["p-Q8_0.gguf", "m-Q8_0.gguf"]
    # A model of its own, it gets the projector, and nothing else is fetched again.
    machine.hub.requests.clear()
    done = machine.run("pull", "--catalog", machine.catalog(f"{{name: see, hf: {seeing}}}"))
    assert done.code == 0, done.err
    assert done.files["see.projector"].read_bytes() == GGUF + b"eyes"
    assert machine.downloads() == ["mmproj-m-f16.gguf"]


def test_a_projector_that_is_not_wanted_is_not_fetched(machine: Machine) -> None:
    own = machine.folder / "own.gguf"
    own.write_bytes(GGUF + b"own")
    for projector in ("none", str(own)):
        flags = ("--hf", "owner/seeing-GGUF:Q8_0", "--alias", "m", "--projector", projector)
        assert machine.run("pull", *flags).code == 0
    assert machine.downloads() == ["m-Q8_0.gguf"]


def test_a_model_of_an_older_version_gets_its_projector(machine: Machine) -> None:
    flags = ("pull", "--hf", "owner/seeing-GGUF:Q8_0", "--alias", "m")
    assert machine.run(*flags, "--projector", "none").code == 0
    record = machine.volume / "contents.json"
    contents = json.loads(record.read_text())
    assert contents["owner/seeing-GGUF:Q8_0"].pop("projector") is None
    record.write_text(json.dumps(contents))

    without = {"m": machine.volume / "m.gguf"}
    away = machine.run(*flags, HF_ENDPOINT="http://127.0.0.1:9")
    assert (away.code, away.files) == (0, without)
    assert "is served as it is, without a projector" in away.err
    assert machine.run(*flags, HF_HUB_OFFLINE="1") == Done(0, away.out, "")

    machine.hub.requests.clear()
    done = machine.run(*flags)
    assert done.files == without | {"m.projector": machine.volume / "m.projector.gguf"}, done.err
    assert machine.downloads() == ["mmproj-m-f16.gguf"]
    assert Fetched(machine.volume).commit_of("owner/seeing-GGUF:Q8_0") == COMMIT


@pytest.mark.parametrize(
    ("flags", "variables"),
    [((), {"HF_HUB_OFFLINE": "1"}), ((), {"HF_HUB_OFFLINE": "TRUE"}), (("--offline", "true"), {})],
)
def test_offline_only_what_is_there_is_served(
    machine: Machine, flags: tuple[str, ...], variables: dict[str, str]
) -> None:
    refused = machine.run("pull", "owner/plain", *flags, **variables)
    assert refused.code == Exit.BAD_MODEL
    assert refused.err == (
        f"paddock: owner/plain is not in {machine.volume}, and nothing is fetched because `offline` or HF_HUB_OFFLINE "
        "is set; run `paddock models pull` where the hub can be reached, or unset it\n"
    )
    assert machine.hub.requests == []
    assert machine.run("pull", "owner/plain").code == 0
    machine.hub.requests.clear()
    done = machine.run("pull", "owner/plain", *flags, **variables)
    assert (done.code, done.err) == (0, "")
    assert done.files["owner/plain"].read_bytes() == GGUF + b"plain"
    assert machine.hub.requests == []


def test_names_choose_among_the_catalog_and_the_hub(machine: Machine) -> None:
    models = ("{name: owner/plain, hf: owner/demo}", "{name: idle, hf: owner/plain, workers: 0}")
    file = machine.catalog(*models, "{name: other, hf: owner/nothing}")
    done = machine.run("pull", "idle", "owner/seeing-GGUF:Q8_0", "owner/plain", "--catalog", file)
    assert done.code == 0, done.err
    assert set(done.files) == {"idle", "owner/plain", "owner/seeing-GGUF:Q8_0"}
    assert done.files["owner/plain"].read_bytes() == DEMO_MODEL.read_bytes(), "the catalog's names go first"
    assert not (machine.volume / "owner--seeing-GGUF--Q8_0.gguf").exists()
    wrong = machine.run("pull", "idel", "--catalog", file)
    assert wrong.code == Exit.USAGE
    assert "models pull: idel: no model of the catalog has this name (owner/plain, idle, other)" in wrong.err


def test_a_quota_is_kept_before_anything_comes(machine: Machine) -> None:
    flags = ("--models-mib", "6")
    assert machine.run("pull", "owner/seeing-GGUF", *flags).code == 0
    machine.hub.requests.clear()
    refused = machine.run("pull", "owner/demo", *flags)
    assert refused.code == Exit.BAD_MODEL
    assert "paddock: owner/demo: " in refused.err
    assert " are to come, but models_mib leaves " in refused.err
    assert f"of 6.0 MiB in {machine.volume}; remove models by `paddock models rm`, or raise models_mib" in refused.err
    assert machine.downloads() == []
    assert machine.run("pull", "owner/seeing-GGUF", *flags).code == 0, "what is there needs no room"
    assert machine.run("rm", "owner/seeing-GGUF").code == 0
    assert machine.run("pull", "owner/demo", *flags).code == 0


def test_lines_tell_of_progress_and_a_bar_on_a_terminal(machine: Machine) -> None:
    done = machine.run("pull", "owner/seeing-GGUF")
    assert "paddock: m-Q4_K_M.gguf: fetching 3.0 MiB\npaddock: m-Q4_K_M.gguf: fetched in " in done.err
    assert "%" not in done.err
    machine.run("rm", "owner/seeing-GGUF")
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, "-m", "gateway.cli", "models", "pull", "owner/seeing-GGUF"]
    subprocess.run(command, env=machine.environment(), stdout=subprocess.DEVNULL, stderr=inner, timeout=60, check=True)
    os.close(inner)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "m-Q4_K_M.gguf: 100%" in shown
    assert "fetched in" not in shown


def listed(machine: Machine, *flags: str) -> dict[str, dict[str, object]]:
    done = machine.run("list", "--json", *flags)
    assert done.code == 0, done.err
    return {row["name"]: row for row in json.loads(done.out)["models"]}


def test_a_list_tells_what_is_there_and_what_for(machine: Machine) -> None:
    file = machine.catalog(
        "{name: see, hf: owner/seeing-GGUF}",
        f"{{name: here, path: {DEMO_MODEL}, speculation: {{draft: {{hf: owner/plain}}}}}}",
        "{name: away, path: away.gguf, workers: 0}",
    )
    assert machine.run("pull", "see", "--catalog", file).code == 0
    assert machine.run("pull", "owner/seeing-GGUF:Q8_0").code == 0
    (machine.volume / "mine-Q5_K_M.gguf").write_bytes(GGUF)
    part = machine.volume / "models--owner--x" / "blobs" / "e.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(100))
    rows = listed(machine, "--catalog", file)
    told = {name: (row["quant"], row["bytes"], row["state"], row["in_catalog_as"]) for name, row in rows.items()}
    assert told == {
        "owner/plain": ("", 0, "missing", ["here (draft)"]),
        "owner/seeing-GGUF": ("Q4_K_M", len(BIG) + len(GGUF) + 4, "here", ["see"]),
        "owner/seeing-GGUF:Q8_0": ("Q8_0", len(GGUF) * 2 + 6, "here", []),
        str(DEMO_MODEL): ("", DEMO_MODEL.stat().st_size, "here", ["here"]),
        str(machine.folder / "away.gguf"): ("", 0, "missing", ["away"]),
        "mine-Q5_K_M.gguf": ("Q5_K_M", len(GGUF), "here", []),
        "models--owner--x/blobs/e.part": ("", 100, "unfinished", []),
    }
    assert rows["owner/seeing-GGUF"]["commit"] == COMMIT
    lines = machine.run("list", "--catalog", file, "--models-mib", "50").out.splitlines()
    assert lines[0].split() == ["MODEL", "QUANT", "SIZE", "STATE", "IN", "CATALOG", "AS"]
    assert lines[2].split() == ["owner/seeing-GGUF", "Q4_K_M", "3.0", "MiB", "here", "see"]
    assert lines[-1] == f"{machine.volume}: 3.0 MiB of 50.0 MiB (models_mib)"


def test_files_are_verified(machine: Machine) -> None:
    file = machine.catalog("{name: good, hf: owner/demo}", f"{{name: own, path: {DEMO_MODEL}}}")
    missing = machine.run("verify", "--catalog", file)
    assert missing.code == Exit.BROKEN
    assert "BROKEN\towner/demo\towner/demo is not here; fetch it with `paddock models pull`" in missing.out
    machine.run("pull", "good", "--catalog", file)
    done = machine.run("verify", "--catalog", file)
    assert done.code == 0, done.out
    assert "demo-F16.gguf (SHA-256 and structure)\n" in done.out
    assert done.out.endswith(f"ok\t{DEMO_MODEL}\t{DEMO_MODEL} (structure; its SHA-256 is not known)\n")

    (blob,) = (machine.volume / "models--owner--demo" / "blobs").iterdir()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    cut = machine.volume / "cut.gguf"
    cut.write_bytes(DEMO_MODEL.read_bytes()[:-5000])
    spoilt = machine.run("verify", "--catalog", file, "--json")
    assert spoilt.code == Exit.BROKEN
    faults = {row["name"]: row["fault"] for row in json.loads(spoilt.out)["files"]}
    assert " was fetched; remove it with `paddock models rm --force`, and fetch it again" in faults["owner/demo"]
    assert "truncated" in faults["cut.gguf"]
    assert faults[str(DEMO_MODEL)] == ""
    assert machine.run("verify", "own", "--catalog", file).code == 0, "only what is named"


def test_what_is_removed_frees_its_space(machine: Machine) -> None:
    machine.run("pull", "--hf", "owner/seeing-GGUF", "--alias", "m")
    machine.run("pull", "owner/seeing-GGUF:Q8_0")
    done = machine.run("rm", "owner/seeing-GGUF")
    assert done.code == 0, done.err
    assert done.out == "owner/seeing-GGUF: removed, 3.0 MiB freed; others use mmproj-m-f16.gguf, which is kept\n"
    assert not (machine.volume / "m.gguf").is_symlink(), "the name by which it was found"
    assert (machine.volume / "m.projector.gguf").exists()
    assert machine.run("verify", "owner/seeing-GGUF:Q8_0").out.count("SHA-256 and structure") == 2
    assert set(listed(machine)) >= {"owner/seeing-GGUF:Q8_0"}
    assert machine.run("pull", "owner/seeing-GGUF").code == 0, "it can be fetched again"
    for name in ("owner/seeing-GGUF", "owner/seeing-GGUF:Q8_0"):
        assert machine.run("rm", name).code == 0
    assert not (machine.volume / "models--owner--seeing-GGUF").exists()


def test_what_is_used_is_not_removed(machine: Machine) -> None:
    file = machine.catalog("{name: m, hf: owner/plain}")
    path = machine.run("pull", "m", "--catalog", file).files["m"]
    refused = machine.run("rm", "m", "--catalog", file)
    assert refused.code == Exit.USAGE
    assert "models rm: the catalog names owner/plain, as m; take it out there first, or give --force" in refused.err

    with StateFolder(machine.state) as folder:
        (folder.run / "m-1.json").write_bytes(msgspec.json.encode(ModelSpec(name="m", path=str(path))))
        assert listed(machine)["owner/plain"]["runs_as"] == ["m"]
        refused = machine.run("rm", "owner/plain")
        assert refused.code == Exit.USAGE
        assert "models rm: owner/plain is in use now, as m; stop `paddock up` first, or give --force" in refused.err
        assert path.exists()
        assert machine.run("rm", "owner/plain", "--force").code == 0
        assert not path.exists()
    outside = machine.run("rm", str(DEMO_MODEL), "--force")
    assert outside.code == Exit.USAGE
    assert "remove it yourself if nobody needs it" in outside.err


def test_what_came_of_broken_downloads_is_removed(machine: Machine) -> None:
    part = machine.volume / "models--owner--x" / "blobs" / "e.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(2048))
    done = machine.run("rm", "--unfinished")
    assert (done.code, done.out) == (0, "models--owner--x/blobs/e.part: removed, 2.0 KiB freed\n")
    assert not part.exists()


def test_a_cache_of_other_programs_is_left_alone(machine: Machine) -> None:
    home = str(machine.folder / "hf")
    done = machine.run("pull", "owner/plain", HF_HOME=home)
    assert done.files["owner/plain"].is_relative_to(home)
    refused = machine.run("rm", "owner/plain", HF_HOME=home)
    assert refused.code == Exit.USAGE
    assert "is in a cache that HF_HOME or HF_HUB_CACHE names, and other programs may use it" in refused.err
    assert machine.run("rm", "owner/plain", "--force", HF_HOME=home).code == 0
    assert not done.files["owner/plain"].exists()


def test_a_record_that_leads_elsewhere_removes_nothing(machine: Machine) -> None:
    own = machine.folder / "own.gguf"
    own.write_bytes(GGUF)
    machine.volume.mkdir()
    (machine.volume / "fetched.json").write_text(json.dumps({"owner/plain": str(own)}))
    refused = machine.run("rm", "owner/plain", "--force")
    assert refused.code == Exit.USAGE
    assert f"models rm: {own} is not in {machine.volume}; remove it yourself" in refused.err
    assert own.exists()


def test_a_file_tells_what_it_is(machine: Machine) -> None:
    file = machine.catalog(f"{{name: demo, path: {DEMO_MODEL}, adapters: [{{name: a, hf: owner/lora}}]}}")
    done = machine.run("show", "demo", "--catalog", file)
    assert done.code == 0, done.err
    told = dict(line.split("  ", 1) for line in done.out.splitlines() if not line.startswith(" "))
    expected = {
        "file": str(DEMO_MODEL),
        "kind": "model",
        "chat template": "default",
        "in catalog as": "demo",
        "adapters": "a (owner/lora)",
    }
    assert {name: told[name].strip() for name in expected} == expected
    shown = json.loads(machine.run("show", str(DEMO_MODEL), "--json").out)
    assert shown["architecture"]
    assert min(shown["num_parameters"], shown["n_ctx"], shown["num_tokens"], shown["num_layers"]) > 0
    adapter = DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf")
    assert json.loads(machine.run("show", str(adapter), "--json").out)["kind"] == "adapter"
    missing = machine.run("show", "owner/nothing")
    assert missing.code == Exit.USAGE
    assert "models show: owner/nothing: not found" in missing.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lst",), "models lst: no such command (did you mean list?); use one of: list, pull, plan, show, verify, rm"),
        (("list", "--jsn"), "models list: --jsn is not known (did you mean --json?)"),
        (("rm",), "models rm: give names, as `paddock models list` lists them, or --unfinished"),
        (("rm", "x", "--unfinished"), "models rm: give names"),
        (("list", "--catalog", "/nowhere.yaml"), "/nowhere.yaml: No such file or directory"),
        (("list", "--models-mib", "-1"), "models_mib"),
    ],
)
def test_mistakes_are_told_in_a_line(machine: Machine, words: tuple[str, ...], said: str) -> None:
    done = machine.run(*words)
    assert done.code == Exit.USAGE
    assert said in done.err
    assert "Traceback" not in done.err


def test_help_is_there(machine: Machine) -> None:
    assert "verify [NAME|REFERENCE ...]" in machine.run().out
    assert "--unfinished" in machine.run("rm", "--help").out
