"""`paddock logs`: prints what the processes of `paddock up` or `paddock supervisor` on this machine have written.

NAME ...           gateway, worker-0, redis, accounts ...; default: all of them
-n, --lines N      last lines of each; default: 20
-f, --follow       goes on with what is written from now on, until Ctrl-C
--level LEVEL      debug, info, warning or error: leaves out what matters less
--raw              prints the lines as they are, which are JSON mostly
flags              --state-dir, --config: where the processes keep their state
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from workers import sources
from workers.commands import command
from workers.commands.layout import clean
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings
from workers.supervisor.output import LEVELS, level_of, readable, record_of

LOOK_S = 0.25
SUFFIX = ".log"


SETTINGS = ("--state-dir", "--config")
"""Flags that are settings."""


class LogsUnusable(ValueError):
    """The logs can't be shown as asked; the message says why, for a person."""


class Line(NamedTuple):
    """A line of a log file."""

    time: str
    """When it was written, as the log has it; for a line without a time, that of the line before."""
    name: str
    """The process that wrote it."""
    text: str


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LogsUnusable(f"logs: {message}; `paddock logs --help` lists the flags")


def make_parser() -> ArgumentParser:
    """Return the parser of the flags that are no settings."""
    parser = _Parser(prog="paddock logs", allow_abbrev=False, add_help=False)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-n", "--lines", type=int, default=20)
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("--level", choices=("debug", "info", "warning", "error"), default="debug")
    parser.add_argument("--raw", action="store_true")
    for flag in SETTINGS:  # else their values would count as names
        parser.add_argument(flag)
    return parser


def main(args: Sequence[str], known: Collection[str] = ()) -> int:
    """Run the command and return the exit code. `known`: the names of all settings."""
    if args and args[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return int(Exit.OK)
    try:
        options, flags = make_parser().parse_known_args(args)
        given = vars(options)
        flags += [word for flag in SETTINGS if (value := given[flag[2:].replace("-", "_")]) for word in (flag, value)]
        settings = sources.read(SupervisorSettings, flags, prog="paddock logs", known=known).settings
        files = _files(settings.state_dir.expanduser() / "logs", options.names)
        _print(files, options)
    except sources.SettingsError as error:
        return command.complain(error.problems)
    except LogsUnusable as error:
        return command.complain([str(error)])
    except BrokenPipeError:
        raise  # whoever reads has enough, which `guarded` knows
    except OSError as error:
        return command.complain([f"{error.filename}: {error.strerror}"])
    return int(Exit.OK)


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the log files of these processes, or of all. Raises LogsUnusable."""
    found = {file.name.removesuffix(SUFFIX): file for file in sorted(folder.glob(f"*{SUFFIX}"))}
    if not found:
        raise LogsUnusable(f"logs: there are none in {folder}; name another folder with --state-dir")
    for name in names:
        if name not in found:
            raise LogsUnusable(
                f"logs: {clean(name)} has none{sources.nearest(name, found)}; there are: {', '.join(found)}"
            )
    return [found[name] for name in names or found]


def _print(files: Sequence[Path], options: Namespace) -> None:
    with ExitStack() as opened:
        tails = [opened.enter_context(closing(Tail(file))) for file in files]
        _write(merge(*(list(tail.last(options.lines)) for tail in tails), key=lambda line: line.time), options)
        while options.follow:
            time.sleep(LOOK_S)
            _write(merge(*(list(tail.more()) for tail in tails), key=lambda line: line.time), options)


def _write(lines: Iterable[Line], options: Namespace) -> None:
    for line in lines:
        record = record_of(line.text)
        if level_of(record) < LEVELS[options.level]:
            continue
        text = readable(record) if record and not options.raw else line.text
        for part in text.split("\n"):
            print(part if options.raw else f"{line.time[:19]} {line.name} | {clean(part)}".lstrip())
    sys.stdout.flush()


@dataclass(slots=True)
class Tail:
    """A log file, read from its end on. One that is replaced by a new file is read on there."""

    path: Path
    _file: TextIO | None = field(default=None, init=False)
    _time: str = field(default="", init=False)
    _rest: str = field(default="", init=False)
    """The beginning of a line whose end is not written yet."""

    def last(self, number: int) -> Iterator[Line]:
        """Yield the last lines. Raises OSError."""
        self._file = self.path.open(encoding="utf-8", errors="replace")
        lines = deque(self._whole_lines(), maxlen=max(0, number))
        return iter(lines)

    def more(self) -> Iterator[Line]:
        """Yield the lines that have been written since. Raises OSError."""
        yield from self._whole_lines()
        if self._is_replaced():
            self.close()
            self._file, self._rest = self.path.open(encoding="utf-8", errors="replace"), ""
            yield from self._whole_lines()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _whole_lines(self) -> Iterator[Line]:
        if self._file is None:
            return
        while text := self._file.readline():
            text, self._rest = self._rest + text, ""
            if not text.endswith("\n"):
                self._rest = text
                return
            self._time = str(record_of(text).get("time") or self._time)
            yield Line(self._time, self.path.name.removesuffix(SUFFIX), text.rstrip("\n"))

    def _is_replaced(self) -> bool:
        """Return whether the path leads to another file by now."""
        if self._file is None:
            return False
        try:
            return not self.path.samefile(f"/proc/self/fd/{self._file.fileno()}")
        except OSError:
            return False
