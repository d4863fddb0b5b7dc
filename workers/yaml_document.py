"""Reads a YAML or JSON text that somebody may have made to do harm, or just mistyped: a catalog, settings, an import.

PyYAML raises more than its own errors: ValueError for a date or a number that is none, RecursionError for deep nesting.
And it follows aliases (`*name`), by which a few lines stand for billions of values, or for themselves.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_VALUES = 500_000
"""Maximum values in a document, each as often as aliases name it."""


class YamlInvalid(ValueError):
    """The text is no YAML, or more than is read; the message says why."""


def load_yaml(text: str | bytes) -> Any:
    """Return the document in a text. Raises YamlInvalid."""
    return _read(text, _Loader.get_single_data)


def compose_yaml(text: str | bytes) -> yaml.Node | None:
    """Return the nodes of a document, which know their lines; None: it is empty. Raises YamlInvalid."""
    found: yaml.Node | None = _read(text, _Loader.get_single_node)
    return found


def _read(text: str | bytes, method: Any) -> Any:
    try:
        loader = _Loader(text)
        try:
            return method(loader)
        finally:
            loader.dispose()
    except RecursionError:
        raise YamlInvalid("it is nested too deeply; make it flatter") from None
    except yaml.MarkedYAMLError as error:
        raise YamlInvalid(_told(error)) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise YamlInvalid(" ".join(str(error).split())) from None


def whole_text(text: str) -> str:
    """Return a text whose characters were written as escapes: JSON writes those beyond 16 bits as two halves, which
    YAML takes for two characters. Raises YamlInvalid for a half by itself, which nobody could write as UTF-8."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise YamlInvalid("it has half of a character (such as \\ud83d); write the character itself") from None


def _told(error: yaml.MarkedYAMLError) -> str:
    """Return where a text ends to be YAML, and why."""
    mark, within = error.problem_mark or error.context_mark, error.context
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    why = error.problem or within or "it can't be read"
    remedy = "indent by spaces" if "'\\t'" in why else "check brackets, quotes, colons and indentation there"
    return f"{place}{why}{f' ({within})' if within and within != why else ''}; {remedy}"


class _Loader(yaml.SafeLoader):
    """Reads a document as the safe loader does, as far as it has MAX_VALUES values."""

    def __init__(self, text: str | bytes) -> None:
        super().__init__(text)
        self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """Node that is whole -> number of values in it."""

    def compose_scalar_node(self, anchor: Any) -> Any:
        node: Any = super().compose_scalar_node(anchor)
        if not node.value.isascii():
            node.value = whole_text(node.value)
        return node

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.events.AliasEvent)
        before = self._num_values
        self._num_values += not is_alias
        node: Any = super().compose_node(parent, index)
        if not is_alias:
            self._sizes[node] = self._num_values - before
        elif node in self._sizes:
            self._num_values += self._sizes[node]
        else:
            raise YamlInvalid("an alias (`*name`) stands within what it names; write that out")
        if self._num_values > MAX_VALUES:
            raise YamlInvalid(f"it has more than {MAX_VALUES} values, those that aliases (`*name`) repeat among them")
        return node
