"""Turns arguments that a model writes as plain text into JSON of the type that the tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from workers.chat.tools.json_text import JsonText
from workers.chat.tools.scanner import MAX_HELD_CHARS
from workers.protocol.requests import Tool

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


QUICK_CHARS = 16 << 10
"""Maximum length of a schema that is decoded when the model calls its tool: on the event loop, in a millisecond. Longer
ones are decoded when the parser is made, on a thread."""

MAX_SCHEMA_CHARS = 256 << 10
"""Maximum length of a schema, and of all that are longer than `QUICK_CHARS` together, from which the types of
parameters are read, since other threads wait meanwhile. Of a longer one no parameter is known."""

UNKNOWN: frozenset[str] = frozenset()


class ToolProperties:
    """Knows the parameters of tools, and their types. Decodes a tool's schema once, since a model may call it any
    number of times. Make it on a thread: long schemas are decoded at once."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._found: dict[str, dict[str, frozenset[str]]] = {}
        left = MAX_SCHEMA_CHARS
        for tool in tools:
            num_chars = len(tool.parameters or "")
            if num_chars > QUICK_CHARS:
                self._found[tool.name] = _kinds_by_name(tool) if num_chars <= left else {}
                left -= min(num_chars, left)

    def of(self, name: str) -> Mapping[str, frozenset[str]]:
        """Return the parameters of the tool `name`, in the schema's order, each with its types (`kinds_of`); empty if
        the tool or its parameters are unknown."""
        if name not in self._found:
            tool = next((tool for tool in self._tools if tool.name == name), None)
            if tool is None:  # not kept: a model may write any number of unknown names
                return {}
            self._found[name] = _kinds_by_name(tool)
        return self._found[name]


def _kinds_by_name(tool: Tool) -> dict[str, frozenset[str]]:
    properties = tool.schema().get("properties")
    if not isinstance(properties, dict):
        return {}
    alike: dict[frozenset[str], frozenset[str]] = {}  # thousands of parameters share a few sets
    kinds = ((name, kinds_of(schema)) for name, schema in properties.items())
    return {name: alike.setdefault(found, found) for name, found in kinds}


def kinds_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that the schema allows; empty if they can't be told."""
    if not isinstance(schema, dict):
        return frozenset()
    told = schema.get("type")
    if isinstance(told, str):
        return frozenset({told})
    if isinstance(told, list):
        return frozenset(map(str, told))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_KINDS.get(type(value), "other") for value in values)
    kinds: frozenset[str] = frozenset()
    for part in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found = kinds_of(part)
        if not found:
            return frozenset()
        kinds |= found
    return kinds


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return a text as JSON: a value of one of `kinds` if it can be read as one; otherwise a string."""
    value = TypedText(kinds)
    return value.feed(text) + value.close()


class TypedText:
    """Turns one value, which comes in portions, into JSON (as `json_of` does) when it is complete.

    A value longer than MAX_HELD_CHARS is passed on in portions from then on: a list or object as JSON, any other value
    as a string."""

    def __init__(self, kinds: frozenset[str], *, is_text: bool = False) -> None:
        """`is_text`: the value is a string, passed on as it comes; its opening quote has been written already."""
        self.rest = ""
        """Text that has come and is not read as part of the JSON value."""
        self._kinds = kinds
        self._holds = not is_text
        self._is_json = False
        """Whether the value is passed on as JSON while it comes."""
        self._json = JsonText()
        self._has_begun = False
        """Whether anything but whitespace has come."""
        self._parts: list[str] = []
        """Portions of the value that are held back, as the model wrote them. `_repaired` has them as JSON."""
        self._repaired: list[str] = []
        self._num_chars = 0

    @property
    def is_broken(self) -> bool:
        """Whether a value that is passed on as JSON turned out to be invalid, or has text after its end. The caller
        then ends the value: `close` returns the text that completes it, `rest` is the text that is not part of it."""
        return self._is_json and (self._json.is_broken or (self._json.is_done and bool(self.rest)))

    def feed(self, part: str) -> str:
        """Take more of the value; return the JSON that can be passed on now."""
        if not self._holds:
            return self._read(part) if self._is_json else encode_basestring(part)[1:-1]
        room = MAX_HELD_CHARS - self._num_chars
        held, part = part[:room], part[room:]
        self._num_chars += len(held)
        self._parts.append(held)
        self._repaired.append(self._read(held))
        return self._let_go() + self.feed(part) if part else ""

    def close(self) -> str:
        """Return the rest of the JSON; the value has ended."""
        if not (self._holds or self._is_json):
            return '"'
        last = self._read("", ended=True)
        if self._is_json:
            return last + ("" if self._json.is_done else self._json.close())
        text, repaired = "".join(self._parts), "".join(self._repaired) + last
        is_json = self._json.is_done and not self.rest
        if is_json and (text.lstrip().startswith('"') or self._may_be(repaired)):
            return repaired
        return json.dumps(text, ensure_ascii=False)

    def cut(self) -> str:
        """Return the rest of the JSON, unfinished; the token limit has cut the value off."""
        if self._holds:
            return "".join(self._parts)
        return self._json.held + self.rest if self._is_json else ""

    def _read(self, part: str, *, ended: bool = False) -> str:
        text = self.rest + part if self._has_begun else part.lstrip()
        self._has_begun = self._has_begun or bool(text)
        out, reached = self._json.feed(text, 0, ended=ended)
        self.rest = text[reached:].lstrip() if self._json.is_done else text[reached:]
        return out

    def _let_go(self) -> str:
        self._holds = False
        text, repaired = "".join(self._parts), "".join(self._repaired)
        is_open = not (self._json.is_done or self._json.is_broken)
        self._is_json = is_open and repaired[:1] in ("{", "[") and self._may_be(repaired)
        return repaired if self._is_json else '"' + encode_basestring(text)[1:-1]

    def _may_be(self, repaired: str) -> bool:
        """Return whether to pass on `repaired`, the value as JSON: the schema allows its type, or allows no string."""
        return "string" not in self._kinds or _fits(repaired, self._kinds - {"string"})


def _fits(repaired: str, kinds: frozenset[str]) -> bool:
    first = repaired[:1]
    if first in '{["':
        return {"{": "object", "[": "array", '"': "string"}[first] in kinds
    if first in "tfn":
        return ("null" if first == "n" else "boolean") in kinds
    return "number" in kinds or ("integer" in kinds and repaired.lstrip("-").isdigit())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
