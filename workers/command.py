"""One subcommand of the `paddock` program: which settings it reads and which function runs it.

Imports the standard library only, and the named modules when the command is run: a machine with only the worker's
libraries can run `paddock worker`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from workers.protocol.exits import Exit

OWN_PACKAGES = ("gateway", "workers")


@dataclass(frozen=True, slots=True)
class Command:
    """`settings` and `runner` are `module:name`; the runner takes the settings and returns an exit code."""

    settings: str
    runner: str
    summary: str
    extra: str
    """Extra of the wheel that brings the libraries it needs."""


def named(target: str) -> Any:
    """`module:name` -> the object. Raises ImportError."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def run(name: str, command: Command, args: Sequence[str], known: Collection[str] = ()) -> int:
    """Reads the settings and runs the command; what is wrong with the settings goes to stderr, one line each."""
    try:
        sources = import_module("workers.sources")
        settings_class = named(command.settings)
        runner = named(command.runner)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN_PACKAGES:
            raise
        return complain(
            [f"`paddock {name}` needs {error.name}, which is not installed; install paddock[{command.extra}]"]
        )
    try:
        reading = sources.read(settings_class, args, prog=f"paddock {name}", known=known)
    except sources.SettingsError as error:
        return complain(error.problems)
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    return int(runner(reading.settings))


def complain(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"paddock: {problem}", file=sys.stderr)
    return int(Exit.USAGE)
