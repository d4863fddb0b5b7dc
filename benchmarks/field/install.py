"""The gateways of the field as programs: LiteLLM's proxy from PyPI, Bifrost and llama-swap as Go modules.

Each has its version pinned here and is installed once, outside of the checkout: LiteLLM into an environment of its own
in the benchmark folder (`benchmarks.reference.bench_dir`), the others where `tests.support.go_tools` keeps what it
builds. A program of that name on the PATH is taken as it is. What could not be installed is remembered with its reason,
so that a run neither asks a registry again nor builds for minutes again what fails; `--again` forgets that.
"""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

from benchmarks.reference import bench_dir
from tests.support.go_tools import GoTool, NoTool, have

LITELLM = "1.106.12"
BIFROST = GoTool(
    "bifrost-http",
    "github.com/maximhq/bifrost/transports/bifrost-http",
    "v1.6.0",
    links="-X main.Version=v1.6.0",
)
"""The last 1.x: releases 2.x of this module have no path of their own, so that Go does not find them."""
LLAMA_SWAP = GoTool("llama-swap", "github.com/mostlygeek/llama-swap", "7a14664", links="-X main.version=7a14664")
"""A commit: its releases are numbered like `v251`, no version to Go. Since that one it builds without its pages."""
INSTALL_TIMEOUT_S = 1800.0


class Missing(Exception):
    """The gateway can't be had on this machine; the message says why."""


def litellm() -> Path:
    """Return the program `litellm`, installed on first use. Raises Missing."""
    folder = bench_dir() / "field" / f"litellm-{LITELLM}"
    return installed(f"litellm-{LITELLM}", lambda: _litellm(folder))


def go_program(tool: GoTool) -> Path:
    """Return the program, built on first use. Raises Missing."""
    return installed(f"{tool.name}-{tool.version}", lambda: _built(tool))


def installed(name: str, install: Callable[[], Path]) -> Path:
    """Return what `install` returns, unless it is remembered that it failed. Raises Missing."""
    failed = _failure(name)
    if failed.is_file():
        raise Missing(" ".join(failed.read_text().split()))
    try:
        return install()
    except Missing as error:
        failed.parent.mkdir(parents=True, exist_ok=True)
        failed.write_text(str(error))
        raise


def forget_failures() -> None:
    """Have everything that could not be installed tried again."""
    for failed in _failure("").parent.glob("*.failed"):
        failed.unlink()


def _failure(name: str) -> Path:
    return bench_dir() / "field" / f"{name}.failed"


def _litellm(folder: Path) -> Path:
    program = folder / "bin" / "litellm"
    if (folder / "ready").exists():
        return program
    print(f"installing LiteLLM {LITELLM} and what it needs, once", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", f"litellm[proxy]=={LITELLM}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"pip took longer than {INSTALL_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise Missing((done.stderr.strip().splitlines() or ["pip failed without a word of why"])[-1])
    (folder / "ready").touch()
    return program


def _built(tool: GoTool) -> Path:
    try:
        return have(tool)
    except NoTool as error:
        raise Missing(" ".join(str(error).split())) from None
