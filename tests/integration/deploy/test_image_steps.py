"""The images' `build` stages, run step by step as the Dockerfiles write them; what they make is started without rights.

Not a container: paths of the image are folders of this machine, and its Python is this one's. What this shows is that
the locks are whole, that nothing but what is copied is needed, that the version is checked, and that the result runs
as user 10001 from a tree that it can't write to. It shows nothing of the base images or of the packages of apt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway import __version__
from tests.support.dockerfile import copied, read
from tests.support.redis_server import RedisServer
from tests.support.stack import DEMO_MODEL, ROOT, free_port

USER = 10001
PATHS = re.compile(r"(?<![\w./-])/(?=opt/|src\b|tmp/|var/lib/paddock|models\b)")
KEPT = ("PIP_CERT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE")
"""Where this machine's pip finds packages is its own affair."""
READY_S = 60.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="becoming user 10001 takes root"),
]


@dataclass(slots=True)
class Tree:
    """A folder that stands for the image's root."""

    root: Path

    def here(self, text: str) -> str:
        return PATHS.sub(f"{self.root}/", text)

    def run(self, command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", self.here(command)],
            cwd=self.root / "src",
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
        )

    def build(self, name: str, version: str, first: int = 0) -> tuple[int, subprocess.CompletedProcess[str]]:
        """The stage `build`, from a step on -> the step that ended badly, or how many there are, and how it ended."""
        environment = {"PATH": f"{self.root}/python/bin:/usr/bin:/bin", "HOME": str(self.root / "tmp")}
        environment |= {key: value for key, value in os.environ.items() if key in KEPT} | {"VERSION": version}
        stages = read(ROOT / "deploy" / "docker" / f"{name}.Dockerfile").stages
        steps = next(stage for stage in stages if stage.name == "build").instructions
        done = subprocess.CompletedProcess[str]([], 0, "", "")
        for number, step in enumerate(steps[first:], first):
            if step.word == "COPY":
                self._copy(step.rest)
            elif step.word == "RUN":
                done = self.run(step.rest, environment)
                if done.returncode != 0:
                    return number, done
        return len(steps), done

    def _copy(self, rest: str) -> None:
        _, sources = copied(rest)
        target = self.root / "src" / rest.split()[-1]
        for source in sources:
            origin, into_folder = ROOT / source, rest.endswith("/")
            place = target / origin.name if into_folder else target
            if origin.is_dir():
                shutil.copytree(origin, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, place)


@pytest.fixture
def tree() -> Iterator[Tree]:
    # Not pytest's own folder, which other users may not enter.
    root = Path(tempfile.mkdtemp(prefix="pd-image-"))
    root.chmod(0o755)
    # This machine's Python may lie in a folder that user 10001 can't enter either.
    shutil.copytree(
        sys.base_prefix,
        root / "python",
        symlinks=True,
        ignore=shutil.ignore_patterns("test", "__pycache__", "site-packages"),
    )
    for path in ("src", "opt", "tmp", "var/lib/paddock", "models"):
        (root / path).mkdir(parents=True)
    for path in ("var/lib/paddock", "models"):
        os.chown(root / path, USER, USER)
    yield Tree(root)
    shutil.rmtree(root, ignore_errors=True)


def engine_wheel() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paddock" / "wheels"
    wheels = sorted(cache.glob("*/llama_cpp_python-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        pytest.skip("no llama-cpp-python wheel is kept here; `make up` builds one")
    return wheels[-1]


def started(tree: Tree, name: str, **settings: str) -> subprocess.Popen[bytes]:
    """The image's entry point as its user, who may write to what the image's user may."""
    image = read(ROOT / "deploy" / "docker" / f"{name}.Dockerfile").environment()
    # Where this machine's Python has its own library in a file, it is the copied one.
    environment = {"LD_LIBRARY_PATH": str(tree.root / "python/lib")}
    environment |= {key: tree.here(value) for key, value in (image | settings).items()}
    with (tree.root / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(tree.root / "opt/paddock/bin/paddock"), "worker" if name == "worker" else name],
            env=environment,
            cwd=tree.root / "var/lib/paddock",
            stdout=log,
            stderr=log,
            user=USER,
            group=USER,
            extra_groups=[],
        )


def until(answers: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not answers():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def written(tree: Tree) -> set[str]:
    """Everything that user 10001 owns."""
    return {
        str(path.relative_to(tree.root))
        for path in tree.root.rglob("*")
        if path.lstat().st_uid == USER and path.relative_to(tree.root).parts[0] not in ("var", "models")
    }


def serve(tree: Tree, name: str, port: int, **settings: str) -> None:
    with RedisServer(port=free_port()) as redis:
        settings |= {"PADDOCK_REDIS_URL": f"redis://127.0.0.1:{redis.port}", "PADDOCK_WORKER_SECRET": "s"}
        process = started(tree, name, **settings)
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/health"), process, tree.root / f"{name}.log")
        finally:
            process.terminate()
        assert process.wait(30) == 0, (tree.root / f"{name}.log").read_text()
    assert written(tree) == set()


def test_a_gateway(tree: Tree) -> None:
    reached, wrong = tree.build("gateway", "9.9.9")
    assert wrong.returncode != 0
    assert f"this checkout is {__version__}, not the VERSION 9.9.9" in wrong.stderr
    _, done = tree.build("gateway", __version__, reached)
    assert done.returncode == 0, done.stderr
    missing = tree.run("/opt/paddock/bin/python -c 'import llama_cpp'", {"PATH": "/usr/bin:/bin"})
    assert "No module named 'llama_cpp'" in missing.stderr
    port = free_port()
    serve(
        tree,
        "gateway",
        port,
        PADDOCK_PORT=str(port),
        PADDOCK_HOST="127.0.0.1",
        PADDOCK_API_KEY="pk-test-0123456789abcdef",
    )


def test_a_worker_with_the_engine_of_this_machine(tree: Tree) -> None:
    (tree.root / "opt/engine").mkdir()
    shutil.copy(engine_wheel(), tree.root / "opt/engine")
    # What the stage `engine` leaves beside its wheel.
    (tree.root / "src/requirements").mkdir()
    for name in ("build.lock", "worker.lock"):
        shutil.copy(ROOT / "requirements" / name, tree.root / "src/requirements")
    pip = "/opt/build/bin/python -m pip install --no-compile --no-deps --require-hashes"
    install = f"python3 -m venv /opt/build && {pip} --requirement requirements/build.lock"
    environment = {"PATH": f"{tree.root}/python/bin:/usr/bin:/bin", "HOME": str(tree.root / "tmp")}
    environment |= {key: value for key, value in os.environ.items() if key in KEPT}
    made = tree.run(install, environment)
    assert made.returncode == 0, made.stderr
    _, done = tree.build("worker", __version__)
    assert done.returncode == 0, done.stderr
    shutil.copy(DEMO_MODEL, tree.root / "models/m.gguf")
    port = free_port()
    ports = {"PADDOCK_WORKER_PORT": str(port), "PADDOCK_WORKER_HOST": "127.0.0.1"}
    serve(tree, "worker", port, **ports, PADDOCK_MODEL="/models/m.gguf", PADDOCK_SLOTS="2", PADDOCK_CTX="256")
