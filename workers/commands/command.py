"""Describes a subcommand of the `paddock` program (which settings it reads, which function runs it), and runs it.

Imports the standard library only; the modules that a command names are imported when the command is run. So a machine
with only the worker's libraries can run `paddock worker`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from workers.process import standard_streams
from workers.protocol.exits import Exit

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as in shells: 128 plus the signal's number."""

TERMINATED = 143
"""Exit code of a command that SIGTERM ended before it began to serve. It is not 0: the command did not do its work."""

UNREAD = 141
"""Exit code of a program whose output nobody reads any more: 128 plus SIGPIPE's number."""

OWN_PACKAGES = ("accounts", "gateway", "workers")


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `settings` names a class, `runner` a function from settings to exit code, both as `module:name`."""

    settings: str
    runner: str
    summary: str
    extra: str
    """Name of the package's optional extra (`pip install '.[NAME]'`) with the libraries that the command needs."""


def loaded(module: str) -> ModuleType:
    """Import a module, and all that it imports, without looking for garbage: of thousands of classes and functions none
    is any, and to look through them again and again takes a fifth of the time. Raises ImportError."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def named(target: str) -> Any:
    """Return the object that `module:name` names. Raises ImportError."""
    module, _, name = target.partition(":")
    return getattr(loaded(module), name)


def run(name: str, command: Command, args: Sequence[str], known: Collection[str] = (), **more: Any) -> int:
    """Read the settings, run the command and return its exit code. Print what is wrong with the settings to stderr, one
    line each. `known`: names of all settings; `more`: what the command's function gets beside the settings.

    Until the command sets a handler for SIGTERM, the one set here ends the process."""
    end_at_sigterm()
    try:
        sources = loaded("workers.sources")
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
    return int(runner(reading.settings, **more))


def end_at_sigterm() -> None:
    """Let SIGTERM end the process. Loading libraries takes seconds, and in a container the process can be number 1, for
    which Linux ignores signals that have no handler."""
    signal.signal(signal.SIGTERM, _stopped)


def _stopped(*_: object) -> NoReturn:
    raise SystemExit(TERMINATED)


def guarded(program: Callable[[], int]) -> int:
    """Run a whole program and return its exit code. Call it before anything opens a descriptor: first it opens those of
    standard input, output and error that are closed.

    Ctrl-C before the program handles signals, and a closed output (by `head`, say), end it without a traceback."""
    standard_streams.complete()
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("paddock: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Otherwise Python would try once more at exit to write what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def complain(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"paddock: {problem}", file=sys.stderr)
    return int(Exit.USAGE)
