"""The command line of one settings class: its parser and its help page. Values are read by pydantic-settings."""

from __future__ import annotations

import difflib
import textwrap
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

WIDTH = 110


class UnknownFlag(ValueError):
    """The command line can't be read; the message is for the user."""


def flag(name: str) -> str:
    """Return the flag of a setting's name."""
    return "--" + name.replace("_", "-")


class FlagParser(ArgumentParser):
    """An argparse parser whose help page is made from the settings class; raises UnknownFlag instead of exiting."""

    def __init__(self, settings_class: type[BaseSettings], prog: str) -> None:
        super().__init__(prog=prog, allow_abbrev=False)
        self.settings_class = settings_class

    def format_help(self) -> str:
        summary = " ".join((self.settings_class.__doc__ or "").split())
        lines = [f"usage: {self.prog} [flags]", "", *textwrap.wrap(summary, WIDTH)]
        for title, names in sections(self.settings_class):
            lines += ["", f"{title}:"]
            lines += [line for name in names for line in _entry(name, self.settings_class.model_fields[name])]
        lines += [
            "",
            *textwrap.wrap(
                "Each flag is also a variable (--kv-tokens: PADDOCK_KV_TOKENS) and a key of the config file "
                "(kv_tokens: 4096). A flag wins over a variable, a variable over the file; `paddock config show` "
                "tells what came from where.",
                WIDTH,
            ),
        ]
        return "\n".join(lines) + "\n"

    def error(self, message: str) -> NoReturn:
        raise UnknownFlag(self._with_hint(message))

    def _with_hint(self, message: str) -> str:
        known = [flag(name) for name in self.settings_class.model_fields]
        wrong = next(
            (word for word in message.split() if word.startswith("--") and word.split("=")[0] not in known), None
        )
        close = difflib.get_close_matches(wrong.split("=")[0], known, n=1) if wrong else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{message}{hint}; `{self.prog} --help` lists the flags"


def sections(settings_class: type[BaseSettings]) -> list[tuple[str, list[str]]]:
    """Return fields by declaring class: (first line of its docstring, field names), general classes last."""
    rows: dict[str, list[str]] = {}
    taken: set[str] = set()
    for owner in reversed(settings_class.__mro__):
        names = [
            name
            for name in getattr(owner, "__annotations__", {})
            if name in settings_class.model_fields and name not in taken
        ]
        if names and issubclass(owner, BaseSettings):
            rows.setdefault((owner.__doc__ or owner.__name__).split("\n")[0].rstrip("."), []).extend(names)
            taken.update(names)
    general, *special = rows.items()
    return [*special, general]


def default_text(field: FieldInfo) -> str:
    """Return a field's default as a person writes it; empty for unset."""
    return "" if field.default in (None, "") else str(field.default)


def _entry(name: str, field: FieldInfo) -> list[str]:
    head = f"  {flag(name)} {_placeholder(name, field)}"
    default = default_text(field)
    text = f"{field.description}" + (f" [{default}]" if default else "")
    lines = textwrap.wrap(text, WIDTH - 30)
    if len(head) > 28:
        return [head, *(" " * 30 + line for line in lines)]
    return [head.ljust(30) + lines[0], *(" " * 30 + line for line in lines[1:])]


def _placeholder(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    kinds: Sequence[Any] = get_args(field.annotation) or (field.annotation,)
    if int in kinds:
        return "N"
    if float in kinds:
        return "SECONDS" if name.endswith("_s") else "NUMBER"
    if name.endswith("_dir"):
        return "FOLDER"
    return "FILE" if "Path" in str(kinds) else "TEXT"
