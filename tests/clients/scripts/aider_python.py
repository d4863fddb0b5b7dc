"""What users of aider do: ask about a file, and have it edited, in each of its forms of edits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from steps import CHAT, run

AIDER = str(Path(sys.executable).parent / "aider")
QUIET = [
    "--no-git",
    "--yes-always",
    "--no-check-update",
    "--analytics-disable",
    "--no-show-model-warnings",
    "--no-pretty",
]


def aider(*arguments):
    folder = Path.cwd() / "work"
    folder.mkdir(exist_ok=True)
    (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
    command = [AIDER, "--model", f"openai/{CHAT}", *QUIET, "--no-pretty", *arguments, "add.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode or "litellm." in done.stdout:
        raise RuntimeError(done.stderr + done.stdout[-600:])


def asked():
    aider("--message", "/ask What does add do?")


def edited():
    aider("--message", "Mend add.", "--edit-format", "whole")


def edited_by_differences():
    aider("--message", "Mend add.", "--edit-format", "diff")


def not_streamed():
    aider("--message", "Mend add.", "--no-stream", "--reasoning-effort", "low")


run(asked, edited, edited_by_differences, not_streamed)
