"""Programs written in Go that tests run: helm, the compose tool, and the library that reads compose files.

One is taken from the PATH, else from the folder that GO_TOOLS_FOLDER names, else from
`$XDG_CACHE_HOME/paddock/go/bin`, where it is built at its pinned version once, outside of the checkout, if Go is on
this machine. Where there is none of these, the test is skipped and says why.

    python -m tests.support.go_tools [NAME ...]    builds what is not there yet, and tells how long each took
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
    on_path: bool = True
    """Whether one that a machine has already serves as well."""


HELM = GoTool("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0")
COMPOSE = GoTool(
    "docker-compose",
    "github.com/docker/compose/v2/cmd",
    "v2.40.3",
    links="-X github.com/docker/compose/v2/internal.Version=v2.40.3",
)
COMPOSE_SPEC = GoTool("compose-spec", "github.com/compose-spec/compose-go/v2/cmd", "v2.9.0", on_path=False)
"""Reads and resolves compose files as the compose tool does, being the library in it; quick to build."""

TOOLS = (HELM, COMPOSE, COMPOSE_SPEC)


class NoTool(Exception):
    """Neither there nor to be built; the message says why."""


def helm() -> Path:
    """The program; skips the test where it can't be had."""
    return _or_skip(HELM)


def docker_compose() -> Path:
    """The same for the compose tool, `docker-compose config ...`."""
    return _or_skip(COMPOSE)


def compose_spec() -> Path:
    """The same for the library's own program, `compose-spec FILE`."""
    return _or_skip(COMPOSE_SPEC)


def go() -> Path | None:
    """Go's own program, which need not be on the PATH."""
    found = shutil.which("go")
    return Path(found) if found else GO_USUALLY if GO_USUALLY.is_file() else None


def there(tool: GoTool) -> Path | None:
    """Where the tool is already."""
    on_path = shutil.which(tool.name) if tool.on_path else None
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
    with _alone(target.with_suffix(".lock")):
        if not target.is_file():
            _build(tool, program, target)
    return target


def _or_skip(tool: GoTool) -> Path:
    try:
        return have(tool)
    except NoTool as error:
        pytest.skip(str(error))


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
        flags = ("-trimpath", "-ldflags", f"-s -w {tool.links}".strip(), "-o", str(made))
        for arguments in (("get", f"{tool.package}@{tool.version}"), ("build", *flags, tool.package)):
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
        if names and tool.name not in names:
            continue
        started = time.monotonic()
        try:
            print(f"{tool.name}: {have(tool)} ({time.monotonic() - started:.0f} s)", flush=True)
        except NoTool as error:
            print(f"{tool.name}: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
