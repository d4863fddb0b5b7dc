"""Reads custom tools, whose input is a text, and the input of their calls.

Models can call functions only: they are shown a function with one parameter `input`, a string. Source: OpenAI's API
reference, "Custom tool" of Responses and of chat completions.
"""

from __future__ import annotations

import json
import re

from gateway.api.parameters.base import Loose, quote
from gateway.api.parameters.response_format import to_json
from gateway.errors import InvalidRequest, UnsupportedParameter
from workers.protocol.requests import Constraint, Tool

CUSTOM = "custom"
INPUT = "input"
INPUT_SCHEMA = to_json(
    {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
)

MAX_GRAMMAR_CHARS = 32 << 10
SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


class GrammarBody(Loose):
    syntax: str | None = None
    definition: str | None = None


class CustomFormat(GrammarBody):
    """The format of a custom tool's input: Responses has the grammar in it, chat completions in an object `grammar`."""

    type: str
    grammar: GrammarBody | None = None


def custom_tool(name: str, description: str | None, form: CustomFormat | None, path: str) -> Tool:
    """Return a custom tool as the function that the model sees. `path`: the path of `form`, for errors.

    Raises InvalidRequest or UnsupportedParameter."""
    grammar = None if form is None else _grammar(form, path)
    if grammar is not None:
        told = f"The input is a text that follows this {SYNTAXES[grammar.kind]}:\n\n{grammar.text}"
        description = f"{description}\n\n{told}" if description else told
    return Tool(name, description, INPUT_SCHEMA, strict=True, grammar=grammar)


def _grammar(form: CustomFormat, path: str) -> Constraint | None:
    """Return the grammar of a format; None: the input is any text. Raises InvalidRequest or UnsupportedParameter."""
    if form.type == "text":
        return None
    if form.type != "grammar":
        message = f"`{path}.type` is {quote(form.type)}. Send `text` or `grammar`."
        raise UnsupportedParameter(message, param=f"{path}.type")
    inner, path = (form, path) if form.grammar is None else (form.grammar, f"{path}.grammar")
    if inner.definition is None or not inner.definition.strip():
        raise InvalidRequest(f"`{path}.definition` is missing. Send the grammar.", param=f"{path}.definition")
    if len(inner.definition) > MAX_GRAMMAR_CHARS:
        message = f"`{path}.definition` has more than {MAX_GRAMMAR_CHARS} characters. Send a shorter grammar."
        raise InvalidRequest(message, param=f"{path}.definition")
    if inner.syntax == "lark":
        return Constraint("lark", inner.definition, param="tools")
    if inner.syntax == "regex":
        return Constraint("regex", inner.definition, param="tools")
    given = "missing" if inner.syntax is None else quote(inner.syntax)
    raise UnsupportedParameter(f"`{path}.syntax` is {given}. Send `lark` or `regex`.", param=f"{path}.syntax")


def arguments_of(text: str) -> str:
    """Return a custom tool's input as the model sees it: the JSON arguments of a function with one parameter."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_HEAD_PIECES = 64
"""Number of pieces of the arguments after which the beginning of the input is not looked for any more."""
WHOLE = re.compile(r'(?:[^"\\]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
"""Matches what is complete of a JSON string's inside."""
HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""Matches the first half of a surrogate pair."""
HALF_CHARS = 6


class InputReader:
    """Reads a custom tool's input out of the arguments of its call while they come.

    Half a surrogate pair stays an escape (`\\ud83d`), since UTF-8 has no form for it."""

    __slots__ = ("_arguments", "_is_open", "_rest")

    def __init__(self) -> None:
        self._arguments: list[str] = []
        """The arguments so far, as long as the beginning of the input was not found."""
        self._is_open: bool | None = None
        """Whether more of the input can come; None: its beginning was not found yet."""
        self._rest = ""
        """The end of what came, if the next piece decides what it stands for."""

    def feed(self, arguments: str) -> str:
        """Take more of the arguments; return what they add to the input."""
        if self._is_open is None:
            self._arguments.append(arguments)
            begun = "".join(self._arguments) if len(self._arguments) <= MAX_HEAD_PIECES else ""
            found = HEAD.match(begun)
            if found is None:
                return ""
            arguments, self._arguments, self._is_open = begun[found.end() :], [], True
        return self._take(arguments) if self._is_open else ""

    def end(self) -> str:
        """Return what is left of the input when the arguments have ended. Arguments of another form are the input."""
        if self._is_open is None:
            self._is_open = False
            return _input_of("".join(self._arguments))
        # Where the arguments break off within an escape, only a whole half of a pair is left.
        half, self._rest, self._is_open = HALF.match(self._rest), "", False
        return _decoded(half[0]) if half is not None else ""

    def _take(self, more: str) -> str:
        text = self._rest + more
        found = WHOLE.match(text)
        end = found.end() if found is not None else 0
        if text[end : end + 1] == '"':
            self._is_open, self._rest = False, ""
            return _decoded(text[:end])
        half = max(0, end - HALF_CHARS)
        if HALF.fullmatch(text, half, end) and not _is_escaped(text, half):
            end = half  # the other half may follow
        self._rest = text[end:]
        return _decoded(text[:end])


def _is_escaped(text: str, at: int) -> bool:
    """Return whether the backslash at `at` is itself written by the backslash before it."""
    return (at - len(text[:at].rstrip("\\"))) % 2 == 1


def _decoded(inside: str) -> str:
    """Return the text of a JSON string with this inside."""
    text: str = json.loads(f'"{inside}"', strict=False)
    return _sendable(text)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _input_of(arguments: str) -> str:
    """Return the input in complete arguments; the arguments as they are where they have none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return _sendable(arguments)
    text = value.get(INPUT) if isinstance(value, dict) else None
    return _sendable(text if isinstance(text, str) else arguments)
