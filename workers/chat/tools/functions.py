"""Reads tool calls with a mark for the function and one for each parameter: Qwen3-Coder's and its followers',
Seed-OSS', MiniMax M2's, those of DeepSeek V3.2 and V4.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

They differ in the marks. Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, ByteDance-Seed/Seed-OSS-36B,
MiniMaxAI/MiniMax-M2 and deepseek-ai/DeepSeek-V3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.chat.tools.family import CallSyntax, Family, exact
from workers.chat.tools.parameters import ParameterReader
from workers.chat.tools.scanner import Steps, Tags


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a call, in their order."""

    open: str
    function: str
    """Mark before the function's name."""
    function_named: str
    """Mark after the function's name."""
    parameter: str
    parameter_named: tuple[str, ...]
    """Mark after a parameter's name; where there are two, the first is for text, the second for JSON."""
    parameter_end: str
    function_end: str
    close: str
    one_each: bool = False
    """Whether `open` and `close` stand around each call, not around all of them."""
    lines: bool = False
    """Whether a value stands on lines of its own."""

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
    """Reads such calls, by the family's marks."""

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
