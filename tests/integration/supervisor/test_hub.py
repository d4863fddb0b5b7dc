"""The hub's own library against a hub on loopback, through the process that the supervisor runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from msgspec.structs import replace

from tests.support.hub_server import COMMIT, TAGGED, TOKEN, Hub
from workers.models.catalog import Catalog
from workers.models.fetched import Fetched
from workers.models.files import decode_model, parse_reference
from workers.models.hub.choice import HubError
from workers.models.hub.download import Cache
from workers.models.hub.fetching import fetch
from workers.models.library import Library, ModelUnusable
from workers.models.spec import ModelSpec
from workers.protocol.exits import Exit

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


def fetched(hub: Hub, reference: str, cache: Path) -> Path:
    return Path(fetch(parse_reference(reference), Cache(str(cache)), HfApi(endpoint=hub.url)).path)


def run(hub: Hub, reference: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PADDOCK_"))}
    clean |= {"HF_HOME": str(cache / "home"), **hub.environment, **environment}
    command = [sys.executable, "-m", "workers.models.hub", reference, str(cache)]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)


def test_fetches_the_preferred_file_once(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, "owner/model-GGUF", tmp_path)
    assert done.returncode == 0, done.stderr
    model = decode_model(done.stdout)
    assert Path(model.path).read_bytes() == GGUF + b"q4"
    assert (model.commit, model.sha256) == (COMMIT, {"m-Q4_K_M.gguf": hashlib.sha256(GGUF + b"q4").hexdigest()})
    assert f"owner/model-GGUF is of commit {COMMIT}; pin it as owner/model-GGUF@{COMMIT}" in done.stderr
    hub.requests.clear()
    again = run(hub, "owner/model-GGUF", tmp_path)
    assert again.stdout == done.stdout, again.stderr
    assert not [line for line in hub.requests if line.startswith("GET") and "resolve" in line]


def test_fetches_every_part_and_names_the_first(hub: Hub, tmp_path: Path) -> None:
    first = fetched(hub, "owner/model-GGUF:bf16", tmp_path)
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
        ("owner/model-GGUF@v9", "has no revision 'v9' (any more)"),
        (f"owner/model-GGUF@{'9' * 40}", "has no revision"),
    ],
)
def test_says_in_one_line_what_is_wrong(hub: Hub, tmp_path: Path, reference: str, said: str) -> None:
    with pytest.raises(HubError) as caught:
        fetched(hub, reference, tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_opens_a_gated_repository(hub: Hub, tmp_path: Path) -> None:
    model = fetch(parse_reference("owner/locked"), Cache(str(tmp_path)), HfApi(endpoint=hub.url, token=TOKEN))
    assert Path(model.path).read_bytes() == GGUF


def test_an_error_is_one_line_and_an_exit_code(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, "owner/weights", tmp_path)
    assert (done.returncode, done.stdout) == (Exit.BAD_MODEL, "")
    assert done.stderr.startswith("paddock: owner/weights holds no GGUF file")
    assert len(done.stderr.splitlines()) == 1


OLD, OLDER = "1" * 40, "2" * 40
MOVED = {"owner/model-GGUF": {"m-Q8_0.gguf": GGUF + b"newest", **dict.fromkeys(PARTS, GGUF + b"new parts")}}
HISTORY = {OLD: REPOSITORIES, OLDER: {"owner/model-GGUF": {"m-Q8_0.gguf": GGUF + b"older"}}, TAGGED: REPOSITORIES}


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub whose repository has changed since; the library asks it."""
    with Hub(MOVED, history={**HISTORY, "v1": REPOSITORIES}) as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        yield served


def library(folder: Path, reference: str) -> Path:
    return Library(folder).locate(ModelSpec(name="m", hf=reference))


@pytest.mark.parametrize(
    ("revision", "content", "commit"),
    [("", b"newest", COMMIT), (f"@{OLD}", b"q8", OLD), (f"@{OLDER}", b"older", OLDER), ("@v1", b"q8", TAGGED)],
)
def test_a_revision_is_what_is_asked_for(
    moved: Hub, tmp_path: Path, revision: str, content: bytes, commit: str
) -> None:
    reference = f"owner/model-GGUF:Q8_0{revision}"
    assert library(tmp_path, reference).read_bytes() == GGUF + content
    assert Fetched(tmp_path).commit_of(reference) == commit


def test_a_hub_that_answers_with_another_commit_is_refused(tmp_path: Path) -> None:
    with (
        Hub(MOVED, history={OLD: REPOSITORIES}, claims=COMMIT) as served,
        pytest.raises(HubError, match=rf"answered with commit {COMMIT}, and {OLD} was asked for"),
    ):
        fetched(served, f"owner/model-GGUF:Q8_0@{OLD}", tmp_path)


def test_what_is_missing_comes_from_the_commit_of_the_rest(moved: Hub, tmp_path: Path) -> None:
    moved.repositories, moved.newest = REPOSITORIES, OLD
    first = library(tmp_path, "owner/model-GGUF:BF16")
    second = first.with_name("m-BF16-00002-of-00002.gguf")
    moved.repositories, moved.newest = MOVED, COMMIT
    second.resolve().unlink()
    assert library(tmp_path, "owner/model-GGUF:BF16") == first
    assert second.read_bytes() == PARTS["big/m-BF16-00002-of-00002.gguf"]
    # Whoever wants the newest takes its line out.
    (tmp_path / "fetched.json").write_text("{}")
    assert library(tmp_path, "owner/model-GGUF:BF16").read_bytes() == GGUF + b"new parts"


def test_a_file_that_was_changed_here_is_refused(moved: Hub, tmp_path: Path) -> None:
    path = library(tmp_path, "owner/model-GGUF:Q8_0")
    os.utime(path)
    assert library(tmp_path, "owner/model-GGUF:Q8_0") == path, "touched, and the same"
    os.chmod(path.resolve(), 0o644)
    path.resolve().write_bytes(GGUF + b"forged")
    with pytest.raises(ModelUnusable, match=rf"is not what was fetched of owner/model-GGUF:Q8_0 \(commit {COMMIT}\)"):
        library(tmp_path, "owner/model-GGUF:Q8_0")
    path.resolve().unlink()
    assert library(tmp_path, "owner/model-GGUF:Q8_0").read_bytes() == GGUF + b"newest"


def test_what_came_is_what_the_hub_describes(tmp_path: Path) -> None:
    with Hub(MOVED, forged={"m-Q8_0.gguf": GGUF + b"forged"}) as served:
        for _ in range(2):
            with pytest.raises(HubError, match="is not the file that the hub describes"):
                fetched(served, "owner/model-GGUF:Q8_0", tmp_path)
        served.forged = {}
        assert fetched(served, "owner/model-GGUF:Q8_0", tmp_path).read_bytes() == GGUF + b"newest"


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    for name in ("fetched.json", "contents.json"):
        (tmp_path / name).write_bytes(b'{"a": "\xff"}')
    assert Fetched(tmp_path).path_of("a") is None


def test_no_file_lies_where_the_hub_says(tmp_path: Path) -> None:
    """A cache names files by what the hub says of their contents."""
    with Hub(MOVED, etag="../../../outside") as served, pytest.raises(HubError, match="which is no hash"):
        fetched(served, "owner/model-GGUF:Q8_0", tmp_path / "a" / "cache")
    assert not list(tmp_path.rglob("*outside*"))


def test_no_more_comes_than_the_hub_has_told(tmp_path: Path) -> None:
    endless = {"m-Q8_0.gguf": bytes(64 << 20)}
    with Hub(MOVED, forged=endless) as served, pytest.raises(HubError, match=r"more than the \d+ bytes that it told"):
        fetched(served, "owner/model-GGUF:Q8_0", tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1 << 20


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
    path = Library(tmp_path / "hub").locate(spec)
    assert path.is_relative_to(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert Library(tmp_path / "hub").locate(spec) == path
    path.unlink()
    with pytest.raises(ModelUnusable, match="could not fetch owner/model-GGUF:Q8_0"):
        Library(tmp_path / "hub").locate(spec)


def test_a_projector_comes_with_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"m-Q8_0.gguf": GGUF + b"q8", "mmproj-m-f16.gguf": GGUF + b"eyes", "mmproj-m-f32.gguf": GGUF + b"more"}
    with Hub({"owner/seeing": files}) as hub:
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        library, spec = Library(tmp_path / "hub"), ModelSpec(name="m", hf="owner/seeing")
        (found,) = library.locate_all(Catalog(models=(spec,)))
        assert Path(found.projector).read_bytes() == GGUF + b"eyes"
        (blind,) = library.locate_all(Catalog(models=(replace(spec, projector="none"),)))
        assert blind.projector == "none"
        hub.requests.clear()
        assert library.locate_all(Catalog(models=(spec,))) == (found,)
        assert not hub.requests
        Path(found.projector).unlink()
        assert library.locate_all(Catalog(models=(spec,))) == (found,), "it is fetched again where it was lost"
        Path(found.projector).resolve().write_bytes(GGUF + b"evil")
        with pytest.raises(ModelUnusable, match="is not what was fetched of owner/seeing"):
            library.locate_all(Catalog(models=(spec,)))
