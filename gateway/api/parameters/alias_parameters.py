"""Applies the parameters of an alias to a request's body, whatever its dialect, before the body is checked.

The catalog names a parameter once; dialects spell it in several ways, some within objects. A value of the catalog is
written as the called dialect spells it, and is then checked like a caller's. A parameter that the dialect does not have
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from gateway.api.parameters.base import names_of, synonyms_of
from gateway.api.parameters.options import LENGTHS
from gateway.catalog.names import AliasRules
from gateway.telemetry.request_log import Ignored

Path = tuple[str, ...]
"""Names of the fields that lead to a parameter's value: `("reasoning", "effort")`."""

VARIABLES = "chat_template_kwargs"

SPELLINGS: dict[str, tuple[Path, ...]] = {
    "enable_thinking": (
        ("enable_thinking",),
        (VARIABLES, "enable_thinking"),
        (VARIABLES, "thinking"),
        ("thinking", "type"),
        ("reasoning", "enabled"),
        ("think",),
    ),
    "max_tokens": (
        *(("max_tokens",), ("max_completion_tokens",), ("max_output_tokens",), ("n_predict",)),
        *((name,) for name in LENGTHS),
    ),
    "n": (("n",), ("n_cmpl",)),
    "reasoning_budget_tokens": (
        *(("reasoning_budget_tokens",), ("thinking_budget_tokens",)),
        *(("thinking", "budget_tokens"), ("reasoning", "max_tokens")),
    ),
    "reasoning_effort": (
        *(("reasoning_effort",), ("output_config", "effort"), ("reasoning", "effort")),
        *((VARIABLES, "reasoning_effort"), ("think",)),
    ),
    "response_format": (
        *(("response_format",), ("text", "format"), ("output_config", "format"), ("output_format",), ("format",)),
    ),
    "stop": (("stop",), ("stop_sequences",)),
    "tool_choice": (("tool_choice",), ("function_call",)),
    "tools": (("tools",), ("functions",)),
}
"""Parameter -> its spellings in all dialects; a value is written by the first one that the dialect has. Parameters that
are not listed are spelled as they are named. Synonyms of fields (`Also`) are spellings as well."""

NEUTRAL: dict[Path, Any] = {("thinking", "type"): "auto"}
"""Field that its object needs -> the value that says nothing."""


def apply_rules(rules: AliasRules, document: dict[str, Any], kind: type[BaseModel], ignored: Ignored) -> dict[str, Any]:
    """Return the body of a request with the parameters of the alias that it calls. `kind`: the class of the body.

    What a caller says in vain is noted in `ignored`."""
    kept = dict(document)
    for name in rules.dropped:
        for path, _ in _drop(kept, name, kind):
            ignored.note(".".join(path))
    for parameter, value in _each(rules.defaults):
        if _is_new(kept, parameter, kind):
            _write(kept, parameter, value, kind)
    for parameter, value in _each(rules.fixed):
        for path, said in _drop(kept, parameter, kind):
            if said != value:
                ignored.note(".".join(path))
        _write(kept, parameter, value, kind)
    return kept


def _each(values: Mapping[str, Any]) -> Iterator[tuple[str | Path, Any]]:
    """Yield each parameter and its value. Each variable of a chat template is one, named by its path."""
    for name, value in values.items():
        if name == VARIABLES:
            yield from (((VARIABLES, variable), one) for variable, one in value.items())
        else:
            yield name, value


def _spellings(name: str | Path, kind: type[BaseModel]) -> list[Path]:
    if isinstance(name, tuple):
        return [name]
    paths = SPELLINGS.get(name, ((name,),))
    more = [(other,) for path in paths if len(path) == 1 for other in synonyms_of(kind).get(path[0], ())]
    return [*paths, *(path for path in more if path not in paths)]


def _is_new(document: Mapping[str, Any], name: str | Path, kind: type[BaseModel]) -> bool:
    """Return whether the caller says nothing of a parameter, under any of its names."""
    return all(_value_at(document, path) is None for path in _spellings(name, kind))


def _value_at(document: Mapping[str, Any], path: Path) -> Any:
    value: Any = document.get(path[0])
    if len(path) == 1:
        return value
    # A field that can be an object may be a plain value as well: `thinking: true`.
    found = value.get(path[1]) if isinstance(value, dict) else value if path in NEUTRAL else None
    return None if found == NEUTRAL.get(path) else found


def _drop(document: dict[str, Any], name: str | Path, kind: type[BaseModel]) -> list[tuple[Path, Any]]:
    """Take a parameter out of the document, under all its names; return where the caller said what."""
    said = [(path, value) for path in _spellings(name, kind) if (value := _value_at(document, path)) is not None]
    for path, _ in said:
        outer = document[path[0]]
        rest = {key: value for key, value in outer.items() if key != path[-1]} if isinstance(outer, dict) else {}
        if len(path) == 1 or not rest:
            del document[path[0]]
        else:
            document[path[0]] = rest | ({path[-1]: NEUTRAL[path]} if path in NEUTRAL else {})
    return said


def _write(document: dict[str, Any], name: str | Path, value: Any, kind: type[BaseModel]) -> None:
    """Write a parameter as the dialect spells it, if it has it."""
    paths = [name] if isinstance(name, tuple) else SPELLINGS.get(name, ((name,),))
    path = next((path for path in paths if path[0] in names_of(kind)), None)
    if path is None:
        return
    if len(path) == 1:
        document[path[0]] = value
        return
    outer = document.get(path[0])
    needed = {other[1]: neutral for other, neutral in NEUTRAL.items() if other[0] == path[0]}
    document[path[0]] = {**needed, **(outer if isinstance(outer, dict) else {}), path[1]: value}
