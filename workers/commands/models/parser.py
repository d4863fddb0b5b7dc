"""Provides the parser of these commands. All settings of a supervisor are flags of each of them."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from workers.models.library import Library
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings
from workers.sources import flag, nearest


class Unusable(ValueError):
    """The command can't be carried out as it was given; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Request:
    """A command that was given, and what it works on."""

    options: Namespace
    settings: SupervisorSettings
    library: Library
    width: int | None
    """Characters of a line of the terminal; None: the output is no terminal."""


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One of the commands."""

    about: str
    add_flags: Callable[[ArgumentParser], None]
    module: str
    """Module whose `run` carries it out. It is imported then only: some of them load llama.cpp."""


Run = Callable[[Request], Exit]


class Parser(ArgumentParser):
    """An argparse parser that raises Unusable instead of exiting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("paddock ")
        raise Unusable(f"{name}: {message}; `{self.prog} --help` tells how it is used")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise Unusable if words are left that are no flags of the command."""
        if words:
            known = [one for action in self._actions for one in action.option_strings]
            self.error(f"{words[0]} is not known{nearest(words[0].partition('=')[0], known)}")


def make_parser(name: str, subcommand: Subcommand) -> Parser:
    """Return the parser of a command's own flags, without those that are settings."""
    about = f"{subcommand.about[:1].upper()}{subcommand.about[1:]}."
    parser = Parser(prog=f"paddock models {name}", description=about, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="print this help")
    subcommand.add_flags(parser)
    return parser


def add_settings(parser: ArgumentParser) -> None:
    """Add a supervisor's settings as flags, all of which take a value; `given` returns those of a command line."""
    about = (
        "All flags of `paddock supervisor`, such as --catalog, --hf, --models-dir, --models-mib and --offline; each is "
        "also a variable and a key of the config file."
    )
    group = parser.add_argument_group("settings", about)
    for name in SupervisorSettings.model_fields:
        group.add_argument(flag(name), dest=f"setting.{name}", metavar="VALUE", default=SUPPRESS, help=SUPPRESS)


def given(options: Namespace) -> list[str]:
    """Return the settings of a parsed command line, as flags."""
    words = []
    for name, value in vars(options).items():
        kind, _, setting = name.partition(".")
        if kind == "setting":
            words += [flag(setting), value]
    return words
