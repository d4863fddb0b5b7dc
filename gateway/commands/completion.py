"""`paddock completion`: prints what makes a shell complete the commands and flags of `paddock`.

bash   source <(paddock completion bash)                                   in ~/.bashrc
zsh    paddock completion zsh > "${fpath[1]}/_paddock"                     once
fish   paddock completion fish > ~/.config/fish/completions/paddock.fish   once

The script is fixed text: it names what this version has, and calls nothing while you type.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import shtab
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from accounts.settings import AccountsSettings
from gateway.bench import options as bench
from gateway.commands import chat
from gateway.commands.accounts import command as admin
from gateway.commands.imports import command as imports
from gateway.settings import GatewaySettings, UpSettings
from workers.commands import cache, command, drain, logs
from workers.commands.models import command as models
from workers.commands.models.parser import make_parser
from workers.settings import CacheSettings, SupervisorSettings, WorkerSettings
from workers.sources import flag

SHELLS = ("bash", "zsh", "fish")
SETTINGS: Mapping[str, type[BaseSettings]] = {
    "up": UpSettings,
    "gateway": GatewaySettings,
    "accounts": AccountsSettings,
    "worker": WorkerSettings,
    "supervisor": SupervisorSettings,
}
"""Command -> the class of the settings that are its flags."""
PLACE = ("host", "port", "api_key", "state_dir", "config")
"""Settings that `paddock chat` and `bench` take."""
CONFIG_PARTS = ("show", "schema", "docs", "compatibility", "metrics")


def main(args: Sequence[str], summaries: Mapping[str, str]) -> int:
    """Run the command and return the exit code. `summaries`: every command's name -> what it does."""
    match list(args):
        case [shell] if shell in SHELLS:
            print(shtab.complete(whole_parser(summaries), shell))
        case [] | ["-h"] | ["--help"]:
            print((__doc__ or "").strip())
        case _:
            return command.complain([f"completion: name one shell of: {', '.join(SHELLS)}"])
    return 0


def whole_parser(summaries: Mapping[str, str]) -> ArgumentParser:
    """Return a parser with all commands and flags of `paddock`. It is read for their names; nothing is parsed by it."""
    root = ArgumentParser(prog="paddock")
    root.add_argument("-V", "--version", action="store_true", help="tell the version")
    parsers = root.add_subparsers()

    def add(name: str, *parents: ArgumentParser, settings: type[BaseSettings] | None = None) -> ArgumentParser:
        parser: ArgumentParser = parsers.add_parser(name, help=summaries.get(name, ""), parents=parents)
        if settings is not None:
            _add_settings(parser, settings)
        return parser

    for name, settings in SETTINGS.items():
        add(name, settings=settings)
    _add_settings(add("chat", chat.make_parser()), GatewaySettings, PLACE)
    _add_settings(add("bench", bench.make_parser()), GatewaySettings, PLACE)
    add("drain", drain.make_parser({**drain.PARTS, "gateway": GatewaySettings}))
    _add_parts(add("cache"), {name: cache.make_parser(name) for name in ("show", "erase")}, CacheSettings)
    models_parts = {name: make_parser(name, part) for name, part in models.COMMANDS.items()}
    _add_parts(add("models"), models_parts, SupervisorSettings)
    _add_settings(add("logs", logs.make_parser()), SupervisorSettings, ("state_dir", "config"))
    _add_settings(add("run", chat.make_parser()), GatewaySettings, PLACE)
    pull = parsers.add_parser("pull", help=summaries.get("pull", ""), parents=[models_parts["pull"]], add_help=False)
    _add_settings(pull, SupervisorSettings)
    add("completion").add_argument("shell", choices=SHELLS)
    add("config").add_argument("part", choices=CONFIG_PARTS)
    add("import", imports.make_parser())
    add("redis").add_argument("part", choices=("acl",))
    admin.add_commands(parsers, summaries)
    return root


def _add_parts(parser: ArgumentParser, parts: Mapping[str, ArgumentParser], settings: type[BaseSettings]) -> None:
    commands = parser.add_subparsers()
    for name, part in parts.items():
        about = part.description or name  # a command without help is not completed
        _add_settings(commands.add_parser(name, help=about, parents=[part], add_help=False), settings)


def _add_settings(parser: ArgumentParser, settings: type[BaseSettings], names: Sequence[str] | None = None) -> None:
    """Add the flags of settings, as far as the parser has none of that name. `names`: None stands for all."""
    taken = {option for action in parser._actions for option in action.option_strings}
    for name, field in settings.model_fields.items():
        if flag(name) not in taken and (names is None or name in names):
            _add_setting(parser, name, field)


def _add_setting(parser: ArgumentParser, name: str, field: FieldInfo) -> None:
    kinds: Sequence[Any] = get_args(field.annotation) or (field.annotation,)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
    action: Any = parser.add_argument(flag(name), choices=choices, help=_plain(field.description or ""))
    if Path in kinds:
        action.complete = shtab.DIRECTORY if name.endswith("_dir") else shtab.FILE


def _plain(text: str) -> str:
    """Return a help text as argparse takes it, in which `%` begins a name."""
    return text.replace("%", "%%")
