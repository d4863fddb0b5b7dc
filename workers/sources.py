"""Reads setting values from flags, `PADDOCK_*` variables, one config file and defaults, by pydantic-settings.

`read` gives the settings together with the origin of each value; everything wrong with them is reported at once, one
line per problem, as `SettingsError`. `FlagParser` is the command line of one settings class, with its help page.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

import msgspec
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, PydanticBaseSettingsSource

from workers.commands.meant_flags import hint
from workers.redis.url import masked as masked_url
from workers.yaml_document import YamlInvalid, load_yaml

WIDTH = 110


class UnknownFlag(ValueError):
    """Raised for a command line that can't be read; the message is for the user."""


def flag(name: str) -> str:
    """Return the command-line flag of the setting with this name."""
    return "--" + name.replace("_", "-")


class FlagParser(ArgumentParser):
    """An argparse parser whose help page is made from the settings class; raises UnknownFlag instead of exiting.

    The class's attribute `usual` names the settings that come first, if it has one."""

    def __init__(self, settings_class: type[BaseSettings], prog: str, beside: Collection[str] = ()) -> None:
        """`beside`: flags of the command that are no settings."""
        super().__init__(prog=prog, allow_abbrev=False)
        self.settings_class = settings_class
        self._beside = beside

    def format_help(self) -> str:
        summary = " ".join((self.settings_class.__doc__ or "").split())
        lines = [f"usage: {self.prog} [flags]", "", *textwrap.wrap(summary, WIDTH)]
        usual = list(getattr(self.settings_class, "usual", ()))
        for title, names in [("What people set first", usual), *sections(self.settings_class)]:
            shown = [name for name in names if name not in usual or names is usual]
            lines += ["", f"{title}:"] if shown else []
            lines += [line for name in shown for line in _entry(name, self.settings_class.model_fields[name])]
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
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        fields, of_catalog = self.settings_class.model_fields, getattr(self.settings_class, "of_catalog", ())
        meant = hint(words.split(), fields, of_catalog, self._beside) if is_unknown else ""
        return f"{message}{meant}; `{self.prog} --help` lists the flags"


def sections(settings_class: type[BaseSettings]) -> list[tuple[str, list[str]]]:
    """Group a class's fields by the class that declares them; return pairs (first line of its docstring, field names).

    The most general class comes last."""
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
    if isinstance(field.default, bool):
        return str(field.default).lower()
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
    if bool in kinds:
        return "true|false"
    if int in kinds:
        return "N"
    if float in kinds:
        return "SECONDS" if name.endswith("_s") else "NUMBER"
    if name.endswith("_dir"):
        return "FOLDER"
    if "Path" in str(kinds):
        return "FILE"
    if name.endswith(("_url", "_endpoint")):
        return "URL"
    return "JSON" if (field.description or "").startswith("JSON") else "TEXT"


PREFIX = "PADDOCK_"

OTHER_VARIABLES = frozenset(
    {"PADDOCK_BENCH_DIR", "PADDOCK_DIE_WITH_PARENT", "PADDOCK_FORK_SOCKET", "PADDOCK_VENV", "PADDOCK_WHEEL_CACHE"}
)
"""Environment variables that begin with `PADDOCK_` but are no settings: other code reads them."""

REDIS_URLS = frozenset({"database_url", "redis_url", "worker_redis_url"})
"""Settings whose value may have a password in it."""
SECRETS = frozenset(
    {
        *("api_key", "api_keys", "cache_secret", "gateway_secret", "metrics_key", "oidc", "otlp_headers"),
        *("webhook_secret", "webhook_url", "worker_secret"),
    }
)

S = TypeVar("S", bound=BaseSettings)


class SettingsError(ValueError):
    """Raised for settings that can't be used; `problems` are lines to show to a person, one per problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Reading(Generic[S]):
    """Settings, where each value came from (field name -> `flag --x`, `env PADDOCK_X`, `file PATH` or `default`),
    and what is odd but harmless."""

    settings: S
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def variable(name: str) -> str:
    return PREFIX + name.upper()


class ConfigFile(PydanticBaseSettingsSource):
    """The settings source that reads the YAML config file. Flags and environment variables say which file: `config`
    names it; without `config` it is `config.yaml` in `state_dir`. Raises SettingsError."""

    def path(self) -> Path | None:
        """Return the path of the config file; None: no file is named, and `state_dir` has none."""
        named = self.current_state.get("config")
        if named:
            return Path(named).expanduser()
        state_dir = self.current_state.get("state_dir") or self.settings_cls.model_fields["state_dir"].default
        usual = Path(state_dir).expanduser() / "config.yaml"
        return usual if usual.is_file() else None

    def document(self) -> dict[str, Any]:
        """Return the file's contents, including keys that this process does not know; empty without a file."""
        path = self.path()
        if path is None:
            return {}
        try:
            document = load_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(
                [f"config: {path}: {error.strerror}; name a readable file or leave --config out"]
            ) from None
        except (YamlInvalid, UnicodeDecodeError) as error:
            raise SettingsError([f"config: {path}: not valid YAML: {error}"]) from None
        if document is None:
            return {}
        if not isinstance(document, dict):
            raise SettingsError([f"config: {path}: must hold lines `setting: value`, not a {type(document).__name__}"])
        return {str(key): value for key, value in document.items()}

    def __call__(self) -> dict[str, Any]:
        path = self.path()
        if path is None:
            return {}
        fields = self.settings_cls.model_fields
        values = {name: value for name, value in self.document().items() if name in fields and value is not None}
        # A path in a file is relative to that file, wherever the process happens to run.
        return {name: _beside(path, fields[name], value) for name, value in values.items()}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False


def read(
    settings_class: type[S],
    args: Sequence[str] = (),
    *,
    prog: str = "paddock",
    known: Collection[str] = (),
    beside: Collection[str] = (),
) -> Reading[S]:
    """Read settings, with the origin of each, from flags, environment and config file.

    `known` are all setting names of Paddock. If it is given, the file's keys outside it are errors, and `PADDOCK_*`
    variables outside it are warnings. `beside`: the command's flags that are no settings. Raises SettingsError;
    `--help` prints and raises SystemExit(0)."""
    flags = _flags(settings_class, args, prog, beside) if args else {}
    environment = EnvSettingsSource(settings_class)()
    file = ConfigFile(settings_class)
    file._set_current_state({**environment, **flags})
    document = file.document()
    origins = {name: _origin(name, flags, environment, document, file.path()) for name in settings_class.model_fields}
    problems = list(_unknown_keys(document, file.path(), known))
    try:
        settings = settings_class(**flags)
    except ValidationError as error:
        problems += _problems(error, settings_class, origins)
    if problems:
        raise SettingsError(problems)
    return Reading(settings, origins, tuple(_unknown_variables(known)))


def _flags(
    settings_class: type[BaseSettings], args: Sequence[str], prog: str, beside: Collection[str]
) -> dict[str, Any]:
    parser = FlagParser(settings_class, prog, beside)
    try:
        source = CliSettingsSource[Any](
            settings_class,
            cli_parse_args=list(_with_values(settings_class, args)),
            cli_kebab_case=True,
            root_parser=parser,
            parse_args_method=FlagParser.parse_args,
        )
    except UnknownFlag as error:
        raise SettingsError([str(error)]) from None
    return dict(source())


def _with_values(settings_class: type[BaseSettings], args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments; a flag that takes true or false and stands alone means true."""
    switches = {flag(name) for name, field in settings_class.model_fields.items() if field.annotation is bool}
    for word, following in zip(args, [*args[1:], "--"], strict=True):
        yield f"{word}=true" if word in switches and following.startswith("--") else word


def environment_of(settings: BaseSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return a child process's environment: `inherited`, and a variable for each explicitly set field of `settings`."""
    values = {variable(name): getattr(settings, name) for name in settings.model_fields_set}
    kept = {name: value for name, value in inherited.items() if name not in values}
    return kept | {name: str(value) for name, value in values.items() if value not in (None, "")}


def masked(name: str, value: object) -> object:
    """Return a setting's value as it may be shown: secrets and passwords are masked, paths are text."""
    if name in SECRETS:
        return "********" if value not in ("", "[]") else value
    if name in REDIS_URLS:
        return masked_url(str(value))
    return str(value) if isinstance(value, Path) else value


def nearest(name: str, known: Collection[str]) -> str:
    """Return ` (did you mean X?)` if a known name is similar; otherwise an empty text."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _origin(
    name: str, flags: Mapping[str, Any], environment: Mapping[str, Any], document: Mapping[str, Any], file: Path | None
) -> str:
    if name in flags:
        return f"flag {flag(name)}"
    if name in environment:
        return f"env {variable(name)}"
    if document.get(name) is not None:
        return f"file {file}"
    return "default"


def _beside(file: Path, field: FieldInfo, value: Any) -> Any:
    is_path = field.annotation is Path or Path in get_args(field.annotation)
    return str(file.parent / Path(value).expanduser()) if is_path and isinstance(value, str) else value


def _unknown_keys(document: Mapping[str, Any], file: Path | None, known: Collection[str]) -> Iterator[str]:
    for key in document:
        if known and key not in known:
            yield f"{key}: {file}: no such setting{nearest(key, known)}; docs/settings.md lists them"


def _unknown_variables(known: Collection[str]) -> Iterator[str]:
    names = {variable(name) for name in known}
    for name in sorted(os.environ):
        if known and name.startswith(PREFIX) and name not in names | OTHER_VARIABLES and not _is_service_link(name):
            yield f"{name}: no such setting{nearest(name, names)}; it is ignored"


def _is_service_link(name: str) -> bool:
    """Return whether Kubernetes made the variable, as it does for Services (`paddock...`) in the pod's namespace."""
    return re.search(r"_(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)$", name) is not None


def _problems(error: ValidationError, settings_class: type[BaseSettings], origins: Mapping[str, str]) -> Iterator[str]:
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else ""
        field = settings_class.model_fields.get(name)
        if field is None:
            yield str(detail["msg"]).removeprefix("Value error, ")
            continue
        given = f"{detail['input']!r} " if name not in SECRETS | REDIS_URLS else "the value "
        remedy = f"change it there, or give {flag(name)}" if not origins[name].startswith("flag") else "change the flag"
        if name == "port" and str(detail["input"]).startswith("tcp://"):
            remedy = (
                "Kubernetes made this variable for a Service named paddock; set enableServiceLinks: false in the pod"
            )
        if detail["type"] == "value_error":
            wrong = str(detail["msg"]).removeprefix("Value error, ")
        else:
            wrong = f"{given}is not {limit(field)}"
        yield f"{name}: {wrong} (from {origins[name]}); {remedy}"


def limit(field: FieldInfo) -> str:
    """Describe in words which values a field takes."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(field.annotation))
    noun = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "text"}.get(
        kinds[0], "valid"
    )
    least, above, most = (_bound(field, mark) for mark in ("ge", "gt", "le"))
    if least is not None and most is not None:
        return f"{noun} from {least} to {most}"
    bounds = [(least, "of at least"), (above, "above"), (most, "of at most")]
    return " ".join([noun, *(f"{words} {bound}" for bound, words in bounds if bound is not None)])


def _bound(field: FieldInfo, mark: str) -> object:
    return next((value for item in field.metadata if (value := getattr(item, mark, None)) is not None), None)


def json_text(value: Any) -> Any:
    """Return a list or mapping, which a config file can hold, as JSON text; return anything else unchanged."""
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value
