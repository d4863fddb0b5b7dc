"""Reads tool calls whose arguments stand between marks of their own, one after the other, and are not JSON.

    <function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function>

Text is passed on as it comes; a value of another type, by the tool's schema, when it is whole or long.
"""

from __future__ import annotations

import json

from workers.chat.tools.family import Ask, Family
from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps, Tags
from workers.chat.tools.typed_text import TypedText, kinds_of, property_schema

TEXT = frozenset({"string"})


class ParameterReader(Reader):
    trims_lines = False
    """Whether a value stands on lines of its own, which it is given without."""

    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__(family, ask)
        self._kinds: dict[tuple[str, str], frozenset[str]] = {}
        """The kinds of a tool's parameters that have come: a schema may list values by ten thousands."""

    def _begin_object(self, name: str) -> None:
        self._begin(name)
        self._drop()
        self._name = name
        self._num_parameters = 0
        self._add("{")

    def _end_object(self, *, found: bool) -> None:
        """End the arguments' object. `found`: the mark of its end was there."""
        if found or not self._cut_off:
            self._add("}")

    def _parameter(self, key: str, end: Tags, *, is_text: bool | None = None) -> Steps[bool]:
        """Read a value up to `end` and past it; return False where it has no end. `is_text`: by the model's mark."""
        kinds = self._kinds_of(key) if is_text is None else frozenset()
        is_text = kinds == TEXT if is_text is None else is_text
        self._add(("" if self._num_parameters == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_parameters += 1
        self._drop()
        if is_text:
            self._add('"')
        value, lines = TypedText(kinds, is_text=is_text), _Lines(self.trims_lines)
        while True:
            text = self._text
            found = None if end.absent(text) else end.find(text, 0)
            cut = len(text) if self._ended else end.first_open(text)
            self._add(value.feed(lines.take(text[: found.start() if found is not None else cut])))
            if value.is_broken:
                self._add(value.close())
                self._text = value.rest + text[found.start() if found is not None else cut :]
                return False
            self._text = text[found.end() if found is not None else cut :]
            if found is not None or self._ended:
                break
            yield
        self._add(value.close() if found is not None or not self._cut_off else value.cut())
        return found is not None

    def _kinds_of(self, key: str) -> frozenset[str]:
        place = self._name, key
        if place in self._kinds:
            return self._kinds[place]
        schema = property_schema(self._ask.tools, *place)
        kinds = kinds_of(schema)
        if schema is not None:  # else it is none of the tools', and a model may write any number of such
            self._kinds[place] = kinds
        return kinds


class _Lines:
    """Removes from a text a line end at its beginning and one at its end."""

    def __init__(self, trims: bool) -> None:
        self._trims = trims
        self._at_start = True
        self._held = ""

    def take(self, part: str) -> str:
        if not self._trims:
            return part
        if not (self._at_start or self._held or part.endswith("\n")):
            return part
        part = self._held + part
        if self._at_start and part:
            part = part.removeprefix("\n")
            self._at_start = False
        self._held = "\n" if part.endswith("\n") else ""
        return part.removesuffix("\n")
