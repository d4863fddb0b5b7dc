"""Reads tool calls written as Python, and those of Llama 3, which can be Python or JSON."""

from __future__ import annotations

from collections.abc import Generator

from workers.chat.tools.family import CallSyntax, Family, list_syntax
from workers.chat.tools.json_calls import HERMES, HermesReader
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps, Tags

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
START, END = "<|python_start|>", "<|python_end|>"
TOOL_CODE = "```tool_code"


class PythonReader(Reader):
    """Reads calls written as Python, as well as calls in JSON.

        [get_weather(city="Paris", days=3), get_time()]

    LFM2 puts <|tool_call_start|> and <|tool_call_end|> around the list, Llama 4 has <|python_start|> and
    <|python_end|>. Gemma 2 and 3, which have no form of their own, put the list into a Markdown fence of `tool_code`.
    A call without marks must begin the answer and name a tool. Source: the chat template of LiquidAI/LFM2-8B-A1B,
    Meta's prompt formats of Llama 3.2 and 4, Google's "Function calling with Gemma"."""

    def _python_calls(self, *, known: bool) -> Steps[bool]:
        """Read one call, or a list of calls; return False if there is none."""
        listed = yield from self._mark("[")
        if not (yield from self._python_call(known=known)):
            return False
        while listed and (yield from self._mark(",")):
            self._drop()
            if not (yield from self._python_call(known=known)):
                return True
        if listed:
            yield from self._mark("]")
        return True

    def _python_call(self, *, known: bool) -> Steps[bool]:
        yield from self._skip_space()
        found = yield from self._identifier(known=known)
        name = (found or "").strip().removesuffix(".call")
        if not self._is_name(name, known=known):
            return False
        self._begin(name)
        self._drop()
        yield from self._arguments(JsonText(parameters=self._properties.of(name)))
        return True

    def _identifier(self, *, known: bool) -> Generator[None, None, str | None]:
        """Return the name before `(`, and leave the `(` unread; None if there is no name. `known`: a name that is cut
        off must be the beginning of a tool's name."""
        start = self._at
        while True:
            rest = self._text[start:]
            name, parenthesis, _ = rest.partition("(")
            if name and not _is_dotted(name):
                return None
            if parenthesis:
                self._at = start + len(name)
                return name
            if self._ended:
                called, dot, call = name.rpartition(".")
                name = called if dot and "call".startswith(call) else name
                if not known or any(tool.name.startswith(name.strip()) for tool in self._ask.tools):
                    self._short = name
                    self._note_name(None)
                return None
            yield


def _is_dotted(name: str) -> bool:
    """Return whether a text can be, or begin, a name like `get_weather`, `files.read` or `get-weather`."""
    return len(name) <= 256 and all(character.isalnum() or character in "_.-" for character in name)


class MarkedPythonReader(HermesReader, PythonReader):
    openers: tuple[str, ...] = (*HermesReader.openers, OPEN, START)
    _closers = Tags((CLOSE, END))

    def _call(self, mark: str) -> Steps[bool]:
        if mark not in ("[", OPEN, START):
            return (yield from super()._call(mark))
        known = mark == "["
        if known:
            self._at = 0
        begun = self._at
        if not (yield from self._python_calls(known=known)):
            self._at = begun
            if not (yield from self._json_calls(known=known)):
                return False
        yield from self._any_mark(self._closers)
        return True


class GemmaReader(HermesReader, PythonReader):
    bare: tuple[str, ...] = (*HermesReader.bare, TOOL_CODE)

    def _call(self, mark: str) -> Steps[bool]:
        if mark in (TOOL_CODE, "["):
            begun = 0 if mark == "[" else self._at
            self._at = begun
            if (yield from self._python_calls(known=True)):
                if mark == TOOL_CODE:
                    yield from self._mark("```")
                return True
            self._at = begun
        return (yield from super()._call(mark)) if mark != TOOL_CODE else False


LFM2 = Family(
    name="lfm2",
    parse=MarkedPythonReader,
    syntax=list_syntax(OPEN, CLOSE),
    marks=((OPEN,), ("<|tool_list_start|>",), ("List of tools: [",)),
    controls=(OPEN, CLOSE),
)

PYTHONIC = Family(
    name="pythonic",
    parse=MarkedPythonReader,
    syntax=HERMES.syntax,
    marks=((START,),),
    controls=(START, END),
)

GEMMA = Family(name="gemma", parse=GemmaReader, syntax=HERMES.syntax, marks=(("<start_of_turn>",),))


PYTHON_TAG = "<|python_tag|>"


class LlamaReader(HermesReader, PythonReader):
    """Reads the calls of Llama 3.1, 3.2 and 3.3, whose answers begin with the calls.

        {"name": "get_weather", "parameters": {"city": "Paris"}}
        <|python_tag|>get_weather.call(city="Paris")
        [get_weather(city="Paris")]

    Several calls follow each other, with semicolons or without. JSON or Python that names no tool is text. Source:
    Meta's prompt formats of Llama 3.1 and 3.2, and the chat templates."""

    openers: tuple[str, ...] = (*HermesReader.openers, PYTHON_TAG)

    def _call(self, mark: str) -> Steps[bool]:
        if mark not in ("[", PYTHON_TAG):
            return (yield from super()._call(mark))
        begun = self._at = 0 if mark == "[" else self._at
        if not (yield from self._python_calls(known=True)):
            self._at = begun
            if not (yield from self._json_calls(known=True)):
                return False
        yield from self._mark(";")
        return True


LLAMA = Family(
    name="llama3",
    parse=LlamaReader,
    syntax=CallSyntax(
        before='{ "name": "', middle='" , "parameters": ', after=" }", between=" ; ", triggers=('{"name"',)
    ),
    marks=(("<|start_header_id|>", '"parameters": '), (PYTHON_TAG,)),
    controls=(PYTHON_TAG,),
)
