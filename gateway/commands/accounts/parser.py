"""Provides the parser of these commands, and the flags that all of them have."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gateway.commands.accounts.api import AdminApi, Answer
from gateway.commands.accounts.flags import read_count
from gateway.commands.logins import Logins
from workers.protocol.exits import Exit
from workers.sources import flag, nearest

SETTINGS = {
    "host": "address of the gateway, with --port",
    "port": "its port",
    "api_key": "the key to send; better by PADDOCK_API_KEY or `paddock login`",
    "state_dir": "folder that has the first key and what `paddock login` keeps",
    "config": "config file",
}
"""The settings that are flags of every command, and what each is here."""
DEFAULTS: Mapping[str, Any] = {"json": False, "url": None, "insecure": False, **dict.fromkeys(SETTINGS)}
"""Flag of every command -> its value if it is not given."""
EPILOG = (
    "Without --url the command calls the gateway of the last `paddock login`, else that of `paddock up` on this "
    "machine, with the key in its state folder."
)


class Unusable(ValueError):
    """The command can't be carried out as it was given; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a command."""

    answer: Answer | None
    """The API's answer, which `--json` prints; None: there is none."""
    text: str
    """The same for a person."""
    code: Exit = Exit.OK


@dataclass(frozen=True, slots=True)
class Call:
    """A command that was given, and what it needs."""

    options: Namespace
    api: AdminApi
    address: str
    """The address that logins are kept by."""
    logins: Logins
    width: int | None
    """Characters of a line of the terminal; None: the output is no terminal."""


Run = Callable[[Call], Result]


class Parser(ArgumentParser):
    """An argparse parser that raises Unusable instead of exiting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def format_help(self) -> str:
        """Return the help page. Its first line has no flags, which are listed below."""
        words = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
        self.usage = " ".join([self.prog, *words, "[flags]"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("paddock ")
        raise Unusable(f"{name}: {message}; `{self.prog} --help` tells how it is used")

    def _check_value(self, action: Action, value: Any) -> None:
        """Raise ArgumentError for a word that is none of the action's choices; it names the nearest one."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = nearest(str(value), known)
            raise ArgumentError(action, f"{value!r} is not known{hint}; use one of: {', '.join(known)}")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise Unusable if words are left that no parser knew."""
        if words:
            name = words[0].partition("=")[0]
            flags = [action for action in self._actions if action.option_strings]
            # A flag can be shorter than the field of the API that it sets.
            of_fields = {flag(action.dest.rpartition(".")[2]): action.option_strings[-1] for action in flags}
            if name in of_fields:
                hint = f" (did you mean {of_fields[name]}?)"
            else:
                known = [one for action in flags for one in action.option_strings]
                hint = nearest(name, known) if name.startswith("-") else ""
            self.error(f"{words[0]} is not known{hint}")


def common() -> Parser:
    """Return a parser with the flags that every command has, as a parent for it."""
    parser = Parser(add_help=False, argument_default=SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the API's answer as it is")
    group = parser.add_argument_group("which gateway")
    group.add_argument("--url", help="address of the gateway")
    group.add_argument("--insecure", action="store_true", help="do not check the certificate of an https address")
    for name, about in SETTINGS.items():
        group.add_argument(flag(name), metavar=name.rpartition("_")[2].upper(), help=about)
    return parser


def add_command(parsers: Any, name: str, run: Run, about: str) -> Parser:
    """Add a command to sub-parsers, and return its parser. `run` carries it out."""
    parser: Parser = parsers.add_parser(
        name, help=about, description=_sentence(about), parents=[common()], epilog=EPILOG
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_offline_command(parsers: Any, name: str, write: Callable[[Namespace], str], about: str) -> Parser:
    """Add a command that calls no gateway. `write` returns its text, or raises Unusable."""
    parser: Parser = parsers.add_parser(name, help=about, description=_sentence(about))
    parser.set_defaults(write=write, parser=parser)
    return parser


def add_group(parsers: Any, name: str, about: str) -> Any:
    """Add a command that has commands of its own, and return the sub-parsers for these."""
    parser: Parser = parsers.add_parser(name, help=about, description=_sentence(about))
    parser.set_defaults(parser=parser)
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def add_paging(parser: Parser, default: Any = None) -> None:
    """Add the flags of long lists. `default`: SUPPRESS for a command below another one that has them."""
    told = {"default": default}
    parser.add_argument("--limit", type=read_count, metavar="N", help="number of rows", **told)
    parser.add_argument("--cursor", metavar="TEXT", help="where to go on, as the list before told", **told)


def more_text(answer: Answer) -> str:
    """Return the line that tells how to go on in a list; empty at its end."""
    cursor = answer.document.get("next")
    return f"\nThere is more: add --cursor {cursor}" if cursor else ""


def _sentence(about: str) -> str:
    return f"{about[:1].upper()}{about[1:]}."
