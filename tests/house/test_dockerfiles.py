"""The Dockerfiles keep the rules of an image that is small, pinned and without rights; the rules can fail."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gateway.settings import known_settings
from tests.support.dockerfile import Dockerfile, complaints, read
from workers.sources import variable

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path for path in sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))}


def kept_in(lines: list[str], path: str) -> bool:
    """As docker reads a .dockerignore: the last line that fits says."""
    kept = True
    for line in lines:
        pattern = line.removeprefix("!")
        if pattern == "*" or path == pattern or path.startswith(f"{pattern}/"):
            kept = line.startswith("!")
    return kept


@pytest.fixture(scope="module")
def context() -> frozenset[str]:
    """What a build gets to see of a clean checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    ignore = (ROOT / ".dockerignore").read_text()
    lines = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    return frozenset(path for path in done.stdout.split("\0") if path and kept_in(lines, path))


@pytest.fixture(params=sorted(FILES))
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read(FILES[request.param])


def test_the_images_are_these() -> None:
    assert set(FILES) == {"accounts", "gateway", "worker", "worker-cuda"}


def test_every_rule_is_kept(dockerfile: Dockerfile, context: frozenset[str]) -> None:
    assert list(complaints(dockerfile, context)) == []


def test_no_secret_and_nothing_else_is_sent_to_the_builder(context: frozenset[str]) -> None:
    folders = {path.partition("/")[0] for path in context}
    packages = {"accounts", "gateway", "workers"}
    assert folders == {"LICENSE", "README.md", "deploy", *packages, "pyproject.toml", "requirements"}
    assert {path for path in context if path.startswith("deploy/")} == {"deploy/demo/paddock-demo.gguf"}


def test_settings_in_the_image_are_settings(dockerfile: Dockerfile) -> None:
    set_there = {name for name in dockerfile.environment() if name.startswith("PADDOCK_")}
    assert set_there <= {variable(name) for name in known_settings()}
    assert dockerfile.environment()["PADDOCK_STATE_DIR"] == dockerfile.environment()["HOME"] == "/var/lib/paddock"


def test_the_port_that_is_asked_is_the_port_that_is_served(dockerfile: Dockerfile) -> None:
    last = dockerfile.stages[-1]
    (asked,) = re.findall(r"os\.environ\['(PADDOCK_\w+)'\]", last.last("HEALTHCHECK"))
    assert dockerfile.environment()[asked].rpartition(":")[2] == last.last("EXPOSE")


def test_only_a_workers_image_has_llama_cpp_and_only_the_accounts_services_a_database() -> None:
    for name in ("accounts", "gateway"):
        assert "llama" not in (ROOT / "requirements" / f"{name}.lock").read_text()
    assert "sqlalchemy" not in (ROOT / "requirements" / "gateway.lock").read_text()
    assert "worker.lock" not in FILES["gateway"].read_text()


def test_both_workers_are_made_the_same_but_for_the_gpu() -> None:
    cpu, cuda = (read(FILES[name]).stages[1].instructions for name in ("worker", "worker-cuda"))
    assert cpu == cuda


@pytest.mark.parametrize("device", [75, 80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_nvidia_gpu_since_turing_has_code(device: int) -> None:
    """Machine code runs on its own generation from its number on, PTX on everything from its number on."""
    (told,) = re.findall(r'^ARG CUDA_ARCHITECTURES="(.+)"$', FILES["worker-cuda"].read_text(), re.MULTILINE)
    parts = [part.partition("-") for part in told.split(";")]
    real = {int(number) for number, _, kind in parts if kind != "virtual"}
    # llama.cpp takes 12X as 12Xa, whose PTX is for that very one.
    ptx = {int(number) for number, _, kind in parts if kind != "real" and int(number) < 120}
    own = any(number <= device and number // 10 == device // 10 for number in real)
    assert own or any(number <= device for number in ptx)
    assert any(number <= device for number in ptx) == (device >= 90)


BROKEN = """
FROM python:latest AS forgotten
RUN apt-get update && apt-get install -y gcc
FROM python:3.12.12-slim-bookworm AS build
ARG HF_TOKEN
ADD https://example.org/x.tar.gz /x
COPY .env requirements.txt /src/
RUN pip install -r requirements.txt && curl -O https://example.org/y
FROM build
COPY --from=nobody /x /x
USER paddock
CMD paddock gateway
"""


def test_the_rules_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "broken.Dockerfile"
    path.write_text(BROKEN)
    found = "\n".join(complaints(read(path), frozenset({"requirements.txt"})))
    for said in (
        *("python:latest has no exact tag", "nothing uses the stage forgotten", "a stage has no name"),
        *("ADD;", "HF_TOKEN would lie", "without --no-install-recommends", "its lists removed", "no lock names"),
        *("pip takes what no hash names", "USER is paddock", "ENTRYPOINT is not in exec form", "CMD is not in exec"),
        *("HEALTHCHECK is missing", "STOPSIGNAL", "no label org", "COPY from nobody", "COPY .env: not tracked"),
    ):
        assert said in found, said
    path.write_text("FROM a:1.2.3 AS a\nSEHLL x\n")
    with pytest.raises(ValueError, match="SEHLL: no such instruction"):
        read(path)
