"""Programs written in Go that tests run: helm, the compose tool, and the library that reads compose files.

One is taken from the PATH, else from the folder that GO_TOOLS_FOLDER names, else from
`$XDG_CACHE_HOME/paddock/go/bin`. Where it is in none of these, the test is skipped and says why. They are built at
their pinned versions, once and outside of the checkout, before the tests begin, where Go is on the machine:

    python -m tests.support.go_tools [NAME|quick ...]    builds what is not there yet, and tells how long each took

`make test` builds the quick ones, and in CI helm as well; `make test-full` builds all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "go"
GO_USUALLY = Path("/usr/local/go/bin/go")
BUILD_TIMEOUT_S = 1800.0
MODULE = "module paddock.invalid/tools\n\ngo 1.24\n"
"""A package is built inside a module of its own: `go install PACKAGE@VERSION` refuses modules that exclude versions."""


@dataclass(frozen=True, slots=True)
class GoTool:
    name: str
    package: str
    version: str
    links: str = ""
    """What the linker writes into it."""
    source: str = ""
    """A program of our own in the folder `go`, which uses the package; empty: the package is the program."""
    quick: bool = False
    """Whether it is built in any run of the tests, rather than in `make test-full` and in CI."""


HELM = GoTool("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0")
COMPOSE = GoTool(
    "docker-compose",
    "github.com/docker/compose/v2/cmd",
    "v2.40.3",
    links="-X github.com/docker/compose/v2/internal.Version=v2.40.3",
)
COMPOSE_CONFIG = GoTool(
    "compose-config", "github.com/compose-spec/compose-go/v2/cli", "v2.9.0", source="compose_config.go", quick=True
)
"""Resolves compose files by the library in the compose tool, which takes a tenth of the time to build."""

TOOLS = (HELM, COMPOSE, COMPOSE_CONFIG)


class NoTool(Exception):
    """Neither there nor to be built; the message says why."""


def helm() -> Path:
    """The program; skips the test where it can't be had."""
    return _or_skip(HELM)


def docker_compose() -> Path:
    """The same for the compose tool, `docker-compose config ...`."""
    return _or_skip(COMPOSE)


def go() -> Path | None:
    """Go's own program, which need not be on the PATH."""
    found = shutil.which("go")
    return Path(found) if found else GO_USUALLY if GO_USUALLY.is_file() else None


def there(tool: GoTool) -> Path | None:
    """Where the tool is already."""
    on_path = shutil.which(tool.name) if not tool.source else None
    named = [Path(folder) / tool.name for folder in (os.environ.get("GO_TOOLS_FOLDER"),) if folder]
    found = [Path(on_path)] if on_path else []
    return next((path for path in (*found, *named, built(tool)) if path.is_file() and os.access(path, os.X_OK)), None)


def built(tool: GoTool) -> Path:
    """Where the tool lies once it is built: a name for each version, so that a new one is built anew."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "paddock" / "go" / "bin" / f"{tool.name}-{tool.version}"


def have(tool: GoTool) -> Path:
    """The tool, built first if it must be. Raises NoTool."""
    if (path := there(tool)) is not None:
        return path
    program = go()
    if program is None:
        raise NoTool(f"no {tool.name} on the PATH or in GO_TOOLS_FOLDER, and no Go to build it with")
    target = built(tool)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_name(f"{target.name}.lock")):
        if not target.is_file():
            _build(tool, program, target)
    return target


def _or_skip(tool: GoTool) -> Path:
    path = there(tool)
    if path is None:
        pytest.skip(
            f"no {tool.name} on the PATH or in GO_TOOLS_FOLDER; where Go is, `make test-full` builds it, and so does "
            f"`python -m tests.support.go_tools {tool.name}`"
        )
    return path


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Tests that run at once build a tool once."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(tool: GoTool, program: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        Path(scratch, "go.mod").write_text(MODULE)
        made = Path(scratch, "made")
        if tool.source:
            shutil.copy(SOURCES / tool.source, scratch)
        flags = ("-trimpath", "-ldflags", f"-s -w {tool.links}".strip(), "-o", str(made))
        program_of = "." if tool.source else tool.package
        for arguments in (("get", f"{tool.package}@{tool.version}"), ("build", *flags, program_of)):
            _run(tool, [str(program), *arguments], Path(scratch))
        os.replace(made, target)


def _run(tool: GoTool, command: list[str], folder: Path) -> None:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NoTool(f"{tool.name}: `go {command[1]}` took longer than {BUILD_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise NoTool(f"{tool.name} {tool.version} could not be built: {last}")


def main(names: list[str]) -> int:
    for tool in TOOLS:
        wanted = tool.name in names or (tool.quick and "quick" in names)
        if names and not wanted:
            continue
        started = time.monotonic()
        try:
            print(f"{tool.name}: {have(tool)} ({time.monotonic() - started:.0f} s)", flush=True)
        except NoTool as error:
            print(f"{tool.name}: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
