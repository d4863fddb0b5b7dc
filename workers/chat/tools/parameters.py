"""Reads tool calls with a mark for each parameter: Qwen3-Coder's and its followers', and GLM's.

Each argument is written between marks of its own, and not as JSON. A text is passed on as it comes. A value that has
another type in the tool's schema is held back until it is complete, or longer than MAX_HELD_CHARS.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from workers.chat.tools.family import CallSyntax, Family, exact
from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps, Tags
from workers.chat.tools.typed_text import UNKNOWN, TypedText

TEXT = frozenset({"string"})


class ParameterReader(Reader):
    trims_lines = False
    """Whether a value is written on lines of its own; if so, the line ends around it are removed."""

    def _begin_object(self, name: str) -> None:
        self._begin(name)
        self._drop()
        self._name = name
        self._num_parameters = 0
        self._add("{")

    def _end_object(self, *, found: bool) -> None:
        """End the object of the arguments. `found`: whether the model has written the mark that ends it."""
        if found or not self._cut_off:
            self._add("}")

    def _parameter(self, key: str, end: Tags, *, is_text: bool | None = None) -> Steps[bool]:
        """Read a value and the mark `end` after it; return False if there is no such mark.

        `is_text`: whether the mark before the value says that it is text; None: that mark says nothing about it."""
        kinds = self._properties.of(self._name).get(key, UNKNOWN) if is_text is None else UNKNOWN
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


class _Lines:
    """Removes one line end from a value's beginning and one from its end, if `trims`. The value comes in parts."""

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


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a call, in the order in which they appear."""

    open: str
    function: str
    """Mark before the function's name."""
    function_named: str
    """Mark after the function's name."""
    parameter: str
    parameter_named: tuple[str, ...]
    """Marks after a parameter's name; if there are two, the first is for text, the second for JSON."""
    parameter_end: str
    function_end: str
    close: str
    one_each: bool = False
    """Whether `open` and `close` are written around each call; False: around all calls together."""
    lines: bool = False
    """Whether a parameter's value is written on lines of its own."""

    def syntax(self) -> CallSyntax:
        opened, closed = f"{self.open} ", f" {self.close}"
        line = "\n" if self.lines else ""
        return CallSyntax(
            open="" if self.one_each else opened,
            before=(opened if self.one_each else "") + exact(self.function),
            middle=self.function_named + " ",
            after=" " + self.function_end + (closed if self.one_each else ""),
            close="" if self.one_each else closed,
            triggers=(self.open,),
            parameter=(
                exact(self.parameter),
                tuple(exact(named) + line for named in self.parameter_named),
                line + self.parameter_end,
            ),
        )


class FunctionReader(ParameterReader):
    """Reads calls that mark the function as well as each parameter: Qwen3-Coder's, and other models' with other marks.

        <tool_call>
        <function=get_weather>
        <parameter=city>
        Paris
        </parameter>
        </function>
        </tool_call>

    Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, ByteDance-Seed/Seed-OSS-36B, MiniMaxAI/MiniMax-M2,
    deepseek-ai/DeepSeek-V3.2 and V4."""

    own: Marks

    def _call(self, mark: str) -> Steps[bool]:
        own = self.own
        if mark == own.open and not (yield from self._mark(own.function)):
            return (yield from self._json_calls()) and ((yield from self._mark(own.close)) or True)
        if not (yield from self._function()):
            return False
        while (yield from self._mark(own.function)):
            if not (yield from self._function()):
                return True
        yield from self._mark(own.close)
        return True

    def _function(self) -> Steps[bool]:
        own = self.own
        found = yield from self._name_up_to(Tags((own.function_named,)))
        name = found[0].strip() if found is not None else None
        if not name or not self._is_name(name):
            return False
        self._begin_object(name)
        ends = Tags((own.parameter, own.function_end))
        while (mark := (yield from self._any_mark(ends))) == own.parameter:
            key = yield from self._up_to(Tags(own.parameter_named))
            if key is None:
                break
            is_text = key[1] == own.parameter_named[0] if len(own.parameter_named) > 1 else None
            if not (yield from self._parameter(key[0].strip(), Tags((own.parameter_end,)), is_text=is_text)):
                break
        self._end_object(found=mark == own.function_end)
        return True


QWEN = Marks(
    *("<tool_call>", "<function=", ">", "<parameter=", (">",), "</parameter>", "</function>", "</tool_call>"),
    one_each=True,
    lines=True,
)
SEED = Marks(
    *("<seed:tool_call>", "<function=", ">", "<parameter=", (">",), "</parameter>", "</function>", "</seed:tool_call>"),
    one_each=True,
)
MINIMAX_MARKS = Marks(
    *("<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', ('">',), "</parameter>", "</invoke>"),
    "</minimax:tool_call>",
)
DSML = Marks(
    *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="', '">', '<｜DSML｜parameter name="'),
    ('" string="true">', '" string="false">'),
    *("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
)
DSML_V4 = replace(DSML, open="<｜DSML｜tool_calls>", close="</｜DSML｜tool_calls>")


class QwenReader(FunctionReader):
    own = QWEN
    openers: tuple[str, ...] = (QWEN.open, QWEN.function)
    trims_lines = QWEN.lines


class SeedReader(FunctionReader):
    own = SEED
    openers: tuple[str, ...] = (SEED.open, SEED.function)


class MiniMaxReader(FunctionReader):
    own = MINIMAX_MARKS
    openers: tuple[str, ...] = (MINIMAX_MARKS.open,)


class DsmlReader(FunctionReader):
    own = DSML
    openers: tuple[str, ...] = (DSML.open,)


class DsmlV4Reader(FunctionReader):
    own = DSML_V4
    openers: tuple[str, ...] = (DSML_V4.open,)


def _family(name: str, reader: type[FunctionReader], *marks: str, ends_thoughts: bool = True) -> Family:
    own = reader.own
    return Family(
        name=name,
        parse=reader,
        syntax=own.syntax(),
        marks=(marks,),
        controls=(own.open, own.close),
        calls_end_thoughts=ends_thoughts,
    )


QWEN3_CODER = _family("qwen3-coder", QwenReader, "<tool_call>", "<function=", "<parameter=", ends_thoughts=False)
SEED_OSS = _family("seed-oss", SeedReader, "<seed:tool_call>")
MINIMAX = _family("minimax-m2", MiniMaxReader, "<minimax:tool_call>")
DEEPSEEK_V32 = _family("deepseek-v3.2", DsmlReader, "｜DSML｜", "function_calls")
DEEPSEEK_V4 = _family("deepseek-v4", DsmlV4Reader, "｜DSML｜", "tool_calls>")


OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

_AFTER_NAME = Tags(("\n", KEY, CLOSE, "{"))
_NEXT = Tags((KEY, CLOSE))
_KEY_END = Tags((KEY_END,))
_VALUE_END = Tags((VALUE_END,))


class GlmReader(ParameterReader):
    """Reads the calls of GLM 4.5 to 4.7, and of other models that write this form.

        <tool_call>get_weather
        <arg_key>city</arg_key>
        <arg_value>Paris</arg_value>
        </tool_call>

    Source: the chat templates of zai-org/GLM-4.6 and GLM-4.7-Flash."""

    openers: tuple[str, ...] = (OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        yield from self._skip_space()
        found = yield from self._name_up_to(_AFTER_NAME)
        if found is None:
            return False
        name, mark = found[0].strip(), found[1]
        if mark == "{" and not name:  # a call in Hermes' form
            self._at -= 1
            return (yield from self._json_calls()) and ((yield from self._mark(CLOSE)) or True)
        if not self._is_name(name) or mark == "{":
            return False
        self._at -= len(mark)
        self._begin_object(name)
        while (mark := (yield from self._any_mark(_NEXT)) or "") == KEY:
            key = yield from self._up_to(_KEY_END)
            if key is None or not (yield from self._mark(VALUE)):
                break
            if not (yield from self._parameter(key[0].strip(), _VALUE_END)):
                break
        self._end_object(found=mark == CLOSE)
        return True


GLM = Family(
    name="glm",
    parse=GlmReader,
    syntax=CallSyntax(
        before=f"{OPEN} ",
        middle=" ",
        after=f" {CLOSE}",
        triggers=(OPEN,),
        parameter=(KEY, (f"{KEY_END} {VALUE}",), VALUE_END),
    ),
    marks=(("<arg_key>", "<arg_value>"),),
    controls=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    calls_end_thoughts=False,
)
