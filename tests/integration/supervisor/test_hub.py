"""The hub's own library against a hub on loopback, through the process that the supervisor runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from tests.support.hub_server import TOKEN, Hub
from workers.protocol.catalog import ModelSpec
from workers.protocol.exits import Exit
from workers.supervisor.hub import HubError, fetch
from workers.supervisor.library import Library, ModelUnusable

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
PARTS = {f"big/m-BF16-0000{n}-of-00002.gguf": GGUF + bytes([n]) * 1000 for n in (1, 2)}
REPOSITORIES = {
    "owner/model-GGUF": {"README.md": b"x", "m-Q4_K_M.gguf": GGUF + b"q4", "m-Q8_0.gguf": GGUF + b"q8", **PARTS},
    "owner/locked": {"m-Q8_0.gguf": GGUF},
    "owner/weights": {"model.safetensors": b"x"},
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(REPOSITORIES, gated=frozenset({"owner/locked"})) as served:
        yield served


def run(hub: Hub, reference: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PADDOCK_"))}
    clean |= {"HF_HOME": str(cache / "home"), **hub.environment, **environment}
    command = [sys.executable, "-m", "workers.supervisor.hub", reference, str(cache)]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)


def test_fetches_the_preferred_file_once(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, "owner/model-GGUF", tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == GGUF + b"q4"
    hub.requests.clear()
    again = run(hub, "owner/model-GGUF", tmp_path)
    assert again.stdout == done.stdout, again.stderr
    assert not [line for line in hub.requests if line.startswith("GET") and "resolve" in line]


def test_fetches_every_part_and_names_the_first(hub: Hub, tmp_path: Path) -> None:
    first = Path(fetch("owner/model-GGUF", "bf16", str(tmp_path), HfApi(endpoint=hub.url)))
    assert first.name == "m-BF16-00001-of-00002.gguf"
    assert (first.parent / "m-BF16-00002-of-00002.gguf").read_bytes() == PARTS["big/m-BF16-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("owner/nothing", "no such model on the hub, or it is private"),
        ("owner/locked", "is gated: accept its terms"),
        ("owner/weights", "holds no GGUF file"),
        ("owner/model-GGUF:Q2_K", "has no file for 'Q2_K'; it has: big/m-BF16.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf"),
        ("not a name", "not a repository name"),
    ],
)
def test_says_in_one_line_what_is_wrong(hub: Hub, tmp_path: Path, reference: str, said: str) -> None:
    repo, _, quant = reference.partition(":")
    with pytest.raises(HubError) as caught:
        fetch(repo, quant, str(tmp_path), HfApi(endpoint=hub.url))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_opens_a_gated_repository(hub: Hub, tmp_path: Path) -> None:
    path = fetch("owner/locked", "", str(tmp_path), HfApi(endpoint=hub.url, token=TOKEN))
    assert Path(path).read_bytes() == GGUF


def test_an_error_is_one_line_and_an_exit_code(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, "owner/weights", tmp_path)
    assert (done.returncode, done.stdout) == (Exit.BAD_MODEL, "")
    assert done.stderr.startswith("paddock: owner/weights holds no GGUF file")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "can't reach the hub"),
    ],
    ids=["offline", "unreachable"],
)
def test_without_a_hub(hub: Hub, tmp_path: Path, environment: dict[str, str], said: str) -> None:
    done = run(hub, "owner/model-GGUF", tmp_path, **environment)
    assert done.returncode == Exit.BAD_MODEL
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("paddock: owner/model-GGUF: ")
    assert said in last
    assert "Traceback" not in done.stderr


def test_the_library_remembers_what_it_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start asks nobody, so it works offline."""
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    spec = ModelSpec(name="m", hf="owner/model-GGUF:Q8_0")
    path = Library(tmp_path / "hub").locate(spec, tmp_path)
    assert path.is_relative_to(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert Library(tmp_path / "hub").locate(spec, tmp_path) == path
    path.unlink()
    with pytest.raises(ModelUnusable, match="could not fetch owner/model-GGUF:Q8_0"):
        Library(tmp_path / "hub").locate(spec, tmp_path)
