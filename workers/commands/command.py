"""One subcommand of the `paddock` program: which settings it reads and which function runs it.

Imports the standard library only, and the named modules when the command is run: a machine with only the worker's
libraries can run `paddock worker`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from workers.protocol.exits import Exit

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells count: 128 and the signal's number."""

TERMINATED = 143
"""The same for SIGTERM before a command has begun to serve: whoever waits for it must not take it for done."""

UNREAD = 141
"""The same for a program whose output nobody reads any more (SIGPIPE)."""

OWN_PACKAGES = ("gateway", "workers")


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `settings` and `runner` are `module:name`; the runner takes the settings, returns the exit code."""

    settings: str
    runner: str
    summary: str
    extra: str
    """Extra of the wheel that brings the libraries that the command needs."""


def named(target: str) -> Any:
    """Return the object that `module:name` names. Raises ImportError."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def run(name: str, command: Command, args: Sequence[str], known: Collection[str] = ()) -> int:
    """Read the settings and run the command; what is wrong with the settings goes to stderr, one line each.

    Until the command has its own handler, SIGTERM ends it in order: in a container it may be process 1, for which
    Linux ignores signals that have no handler, and loading libraries takes seconds.
    """
    signal.signal(signal.SIGTERM, _stopped)
    try:
        sources = import_module("workers.sources")
        settings_class = named(command.settings)
        runner = named(command.runner)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN_PACKAGES:
            raise
        remedy = f"install the extra {command.extra!r}: pip install '.[{command.extra}]' in Paddock's checkout"
        return complain([f"`paddock {name}` needs {error.name}, which is not installed; {remedy}"])
    try:
        reading = sources.read(settings_class, args, prog=f"paddock {name}", known=known)
    except sources.SettingsError as error:
        return complain(error.problems)
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    return int(runner(reading.settings))


def _stopped(*_: object) -> NoReturn:
    raise SystemExit(TERMINATED)


def guarded(program: Callable[[], int]) -> int:
    """Run a whole program and return its exit code.

    Ctrl-C before it listens to signals, and a reader of its output that leaves (such as `head`), end it quietly.
    """
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("paddock: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would be tried once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def complain(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"paddock: {problem}", file=sys.stderr)
    return int(Exit.USAGE)
