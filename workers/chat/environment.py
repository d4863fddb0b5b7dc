"""Makes the Jinja environment that authors of chat templates expect.

Source of its features (`trim_blocks`, loop controls, `raise_exception`, `strftime_now`, `tojson`, `{% generation %}`):
"Chat templates" in the documentation of Hugging Face transformers. Two more come from llama.cpp's interpreter, because
templates rely on them: a template can change lists (`append`), and there is `from_json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import escape


class GenerationTag(Extension):
    """Renders `{% generation %}...{% endgeneration %}` as the text between. The tags mark it for training only."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Missing(Undefined):
    """An undefined value. A template can add it to a text, which then stays as it is, as in llama.cpp's interpreter.

    Command-R+'s template adds each parameter's description to a text, and many parameters have none."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else self._fail_with_undefined_error()

    __radd__ = __add__


def new_environment() -> SandboxedEnvironment:
    """Return a sandbox: no files, modules, or attributes whose names begin with an underscore. It bounds neither time
    nor memory, so untrusted templates are rendered in a process that can be stopped (`workers.chat.render_process`)."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=Missing, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.filters["from_json"] = json.loads
    # If a text were marked as safe, Jinja would escape for HTML whatever is added to it.
    environment.filters["safe"] = str
    for name in ("e", "escape", "forceescape"):
        environment.filters[name] = _escaped
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _escaped(value: Any) -> str:
    return str(escape(value))


def _plain(value: Any) -> Any:
    """Convert a value that JSON can't express: an iterator, such as the result of the filter `map`, to a list; an
    undefined value to None. Raises TypeError for any other value."""
    if isinstance(value, Undefined):
        return None
    if isinstance(value, GeneratorType | Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)
