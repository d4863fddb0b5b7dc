"""Runs `paddock import` on a file, and reads what it made."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.commands.imports.command import main

Capture = Any


@dataclass(frozen=True, slots=True)
class Made:
    code: int
    text: str
    told: str
    access: dict[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.text)
        return found

    def model(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(model for model in self.document["models"] if model["name"] == name)
        return found


def imported(folder: Path, capsys: Capture, text: str, *flags: str) -> Made:
    """Import a file in this process."""
    file, access = folder / "config.yaml", folder / "access.yaml"
    file.write_text(text)
    access.unlink(missing_ok=True)
    code = main([str(file), "--access", str(access), *flags])
    shown = capsys.readouterr()
    written = yaml.safe_load(access.read_text()) if access.exists() else {}
    return Made(code, shown.out, shown.err, written)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Import as a person does, by the program."""
    command = [sys.executable, "-m", "gateway.cli", *words]
    root = str(Path(__file__).parents[4])
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": root}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)
