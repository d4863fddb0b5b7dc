"""`make dist`: a wheel that runs by itself, with neither the console's sources nor llama.cpp; and systemd's unit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gateway import __version__
from workers.protocol.exits import FINAL, Exit

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "deploy" / "systemd" / "paddock.service"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # Without a cache of wheels and without container engines: what they add is copied, not built.
    environment = {**os.environ, "PADDOCK_WHEEL_CACHE": str(folder / "none"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "deploy/dist.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no wheel of llama-cpp-python is built here" in done.stdout
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"paddock-{__version__}-py3-none-any.whl"


def test_sums_are_those_of_the_files(dist: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=dist, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"paddock-{__version__}.tar.gz: OK" in done.stdout


def test_the_same_sources_make_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_wheel_has_what_runs_and_no_sources_of_the_console(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gateway/console/static/app.js", "workers/models/demo/paddock-demo.gguf"} <= names
    assert any(name.endswith(".lua") for name in names)
    assert not [name for name in names if name.startswith(("gateway/console/web", "tests", "benchmarks"))]


def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path, "zip")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import sys, gateway; sys.path[:] = [sys.path[0], *(p for p in sys.path if p)]; print(gateway.__file__)"
    for command in (["-c", program], ["-m", "gateway.cli", "--version"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert str(tmp_path) in done.stdout or __version__ in done.stdout


def test_the_unit_starts_again_what_may_run_and_nothing_else() -> None:
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)
    of_commands = {Exit.NO_GATEWAY, Exit.REFUSED, Exit.FORBIDDEN}
    assert {Exit(int(code)) for code in codes.split()} == {*FINAL} - {Exit.OK, Exit.DRAIN_CUT} - of_commands


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "paddock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "paddock.service"
    unit.write_text(UNIT.read_text().replace("/opt/paddock/.venv/bin/paddock", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "paddock.service" in line]) == (0, [])
