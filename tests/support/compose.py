"""docker-compose.yml as the compose tool resolves it, or the library in that tool where only this is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.go_tools import COMPOSE, COMPOSE_CONFIG, there

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"

Resolved = dict[str, Any]


class Refused(Exception):
    """The tool does not take the file; the message is the tool's."""


NEW_ENV = ROOT / "deploy" / "compose" / "new_env.py"


def new_env() -> dict[str, str]:
    """Return the variables of the `.env` that deploy/compose/new_env.py writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, ".env")
        subprocess.run([sys.executable, str(NEW_ENV), str(path)], capture_output=True, check=True)
        text = path.read_text()
    rows = [line.partition("=") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in rows}


def resolved(variables: dict[str, str], profiles: Sequence[str] = (), file: Path = FILE) -> Resolved:
    """What would run with these variables in `.env`. Raises Refused; skips where no tool is built."""
    with tempfile.TemporaryDirectory() as folder:
        env_file = Path(folder, ".env")
        env_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        if tool := there(COMPOSE):
            chosen = [f"--profile={name}" for name in profiles]
            command = [str(tool), "--file", str(file), "--env-file", str(env_file), *chosen, "config", "--format=json"]
            # It prints what could be read again as a compose file, where a dollar stands twice.
            return _answer(command, Path(folder), twice="$$")
        tool = there(COMPOSE_CONFIG)
        if tool is None:
            pytest.skip(f"no {COMPOSE.name}, no {COMPOSE_CONFIG.name}: `python -m tests.support.go_tools` builds them")
        named = [name for name in variables.get("COMPOSE_PROFILES", "").split(",") if name]
        return _answer([str(tool), str(file), str(env_file), *(profiles or named)], Path(folder))


def _answer(command: list[str], folder: Path, twice: str = "$") -> Resolved:
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Refused(done.stderr.strip())
    document: Resolved = json.loads(done.stdout.replace(twice, "$"))
    return document
