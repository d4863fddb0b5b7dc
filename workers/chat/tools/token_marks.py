"""Reads tool calls whose names and arguments are written between special tokens: DeepSeek's, Kimi's, Functionary's."""

from __future__ import annotations

from collections.abc import Iterable

from workers.chat.tools.family import Ask, CallSyntax, Family
from workers.chat.tools.json_calls import HermesReader
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import Gap, Reader
from workers.chat.tools.scanner import Steps, Tags

DEEPSEEK_OPEN, DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"
KIND = "function"
"""The word before the separator in the older form of DeepSeek's calls."""

_DEEPSEEK_SEPARATOR = Tags((DEEPSEEK_SEPARATOR,))
_AFTER_NAME = Tags((FENCE, "{"))


class DeepSeekReader(HermesReader):
    """Reads the calls of DeepSeek R1, V3 and V3.1.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
        ```json
        {"city": "Paris"}
        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    V3.1 writes the name before the separator and the arguments after it, without a fence. Both forms are read,
    whichever the template shows, and so is Hermes' form.
    Source: the chat templates of deepseek-ai/DeepSeek-R1 and deepseek-ai/DeepSeek-V3.1."""

    openers: tuple[str, ...] = (DEEPSEEK_OPEN, DEEPSEEK_CALL, *HermesReader.openers)
    thought_ends = (DEEPSEEK_OPEN, DEEPSEEK_CALL)

    def _call(self, mark: str) -> Steps[bool]:
        if mark not in (DEEPSEEK_OPEN, DEEPSEEK_CALL):
            return (yield from super()._call(mark))
        if mark == DEEPSEEK_OPEN and not (yield from self._mark(DEEPSEEK_CALL)):
            return False
        return (yield from self._listed(self._one, DEEPSEEK_CALL, DEEPSEEK_CLOSE))

    def _one(self) -> Steps[bool]:
        found = yield from self._name_up_to(_DEEPSEEK_SEPARATOR)
        if KIND.startswith(self._name):
            self._name = ""
        if found is None:
            return False
        name = found[0].strip()
        if not (yield from self._sees("{")):
            named = yield from (self._name_up_to if name == KIND else self._up_to)(_AFTER_NAME)
            if named is None:
                return False
            name = named[0].strip()
            if named[1] == "{":
                self._at -= 1
        if not self._is_name(name) or not (yield from self._sees("{")):
            return False
        self._begin(name)
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(FENCE_END)
        yield from self._mark(DEEPSEEK_CALL_END)
        return True


_DEEPSEEK_CONTROLS = (DEEPSEEK_OPEN, DEEPSEEK_CLOSE, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END)

DEEPSEEK = Family(
    name="deepseek",
    parse=DeepSeekReader,
    syntax=CallSyntax(
        open=DEEPSEEK_OPEN,
        before=f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}",
        middle=f"\n{FENCE}\n",
        after=f" {FENCE_END}{DEEPSEEK_CALL_END}",
        close=DEEPSEEK_CLOSE,
        triggers=(DEEPSEEK_OPEN,),
    ),
    marks=((DEEPSEEK_OPEN, FENCE),),
    controls=_DEEPSEEK_CONTROLS,
    calls_end_thoughts=True,
)

DEEPSEEK_V31 = Family(
    name="deepseek-v3.1",
    parse=DeepSeekReader,
    syntax=CallSyntax(
        open=DEEPSEEK_OPEN,
        before=DEEPSEEK_CALL,
        middle=DEEPSEEK_SEPARATOR,
        after=DEEPSEEK_CALL_END,
        between="",
        close=DEEPSEEK_CLOSE,
        triggers=(DEEPSEEK_OPEN,),
    ),
    marks=((DEEPSEEK_OPEN,),),
    controls=_DEEPSEEK_CONTROLS,
    calls_end_thoughts=True,
)


KIMI_OPEN, KIMI_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

FUNCTIONS = "functions."

_KIMI_ARGUMENTS = Tags((KIMI_ARGUMENTS,))


class KimiReader(Reader):
    """Reads the calls of Kimi K2.

        <|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{"city": "Rome"}
        <|tool_call_end|><|tool_calls_section_end|>

    The text before the arguments is the call's id. It ends with the model's own count of calls, so callers get it
    unchanged. Source: the chat template of moonshotai/Kimi-K2-Instruct."""

    openers: tuple[str, ...] = (KIMI_OPEN, KIMI_CALL)

    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__(family, ask)
        self._ids: set[str] = set()

    def _call(self, mark: str) -> Steps[bool]:
        if mark == KIMI_OPEN and not (yield from self._mark(KIMI_CALL)):
            return False
        return (yield from self._listed(self._one, KIMI_CALL, KIMI_CLOSE))

    def _one(self) -> Steps[bool]:
        found = yield from self._up_to(_KIMI_ARGUMENTS)
        if found is None:
            self._name = self._likely(_unfinished_name(self._short or ""))
            return False
        id = found[0].strip()
        name = self._name = id.removeprefix(FUNCTIONS).rpartition(":")[0] or id
        if not self._is_name(name) or not (yield from self._sees("{")):
            return False
        self._begin(name, self._own(id))
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(KIMI_CALL_END)
        return True

    def _own(self, id: str) -> str:
        """Return the call's id; empty if an earlier call of this answer has it, so that `_begin` makes a new one."""
        if id in self._ids:
            return ""
        self._ids.add(id)
        return id


def _unfinished_name(id: str) -> str:
    """Return the function's name from an id that was cut off, as far as the name was written."""
    name = "" if FUNCTIONS.startswith(id) else id.removeprefix(FUNCTIONS)
    return name.rpartition(":")[0] or name


KIMI = Family(
    name="kimi-k2",
    parse=KimiReader,
    syntax=CallSyntax(
        open=KIMI_OPEN,
        before=f"{KIMI_CALL}functions.",
        middle=f":0{KIMI_ARGUMENTS}",
        after=KIMI_CALL_END,
        between="",
        close=KIMI_CLOSE,
        triggers=(KIMI_OPEN,),
    ),
    marks=((KIMI_OPEN,),),
    controls=(KIMI_OPEN, KIMI_CLOSE, KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END),
    calls_end_thoughts=True,
)


FUNCTION_OPEN, NAMED, FUNCTION_CLOSE = "<function=", ">", "</function>"
RECIPIENT = ">>>"
EVERYBODY = "all"

_NAMED = Tags((NAMED,))


class FunctionaryReader(Reader):
    """Reads the calls of MeetKai's Functionary 3.1, which puts marks around arguments.

        <function=get_weather>{"city": "Paris"}</function>

    Source: the chat template of meetkai/functionary-medium-v3.1."""

    openers: tuple[str, ...] = (FUNCTION_OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        found = yield from self._name_up_to(_NAMED)
        if found is None or not self._is_name(found[0].strip()) or not (yield from self._sees("{")):
            return False
        self._begin(found[0].strip())
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(FUNCTION_CLOSE)
        return True


class Recipients:
    """Marks to look for: the lines that name a tool or `all`. Faster to make than `Tags` if there are many tools."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lines = frozenset(f"{name}\n" for name in names)
        self._longest = max(map(len, self._lines))

    def at(self, text: str, start: int) -> str | None:
        """Return the line at `start` if it names a recipient."""
        line = text[start : text.find("\n", start, start + self._longest) + 1]
        return line if line in self._lines else None

    def may_begin(self, text: str, start: int) -> bool:
        """Return whether more text can turn the text from `start` on into a line that names a recipient."""
        rest = text[start : start + self._longest + 1]
        return any(line.startswith(rest) for line in self._lines)


class RecipientReader(Reader):
    """Reads the calls of Functionary 3.2, which puts a line with a recipient before each part.

        >>>get_weather
        {"city": "Paris"}
        >>>all
        It is sunny.

    The prompt ends with the first `>>>`, so the answer begins with a name. Source: the chat template of
    meetkai/functionary-medium-v3.2."""

    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__(family, ask)
        self._marks = self._at_gap = Tags((RECIPIENT,))
        self._recipients = Recipients((EVERYBODY, *(tool.name for tool in ask.tools)))

    def _answer(self) -> Steps[None]:
        yield from self._mark(RECIPIENT)
        while True:
            recipient = yield from self._any_mark(self._recipients)
            if recipient is None:
                self._reject_recipient()
            elif recipient[:-1] == EVERYBODY:
                self._drop()
                self._gap = Gap.NONE
            elif (yield from self._sees("{")):
                self._begin(recipient[:-1])
                self._drop()
                yield from self._arguments(JsonText())
                self._gap = Gap.CALL
                self.is_over = self._ask.one_call
            elif self._is_cut:
                self._begin_cut(recipient[:-1])
            else:
                self._reject()
            if (yield from self._until(self._marks)) is None:
                return

    def _reject_recipient(self) -> None:
        """Treat the line as text, since its recipient is missing or unknown. But if the token limit cut it off, begin a
        call with the part that was written, or drop that part if it can begin `all` and no call is forced."""
        if not self._is_cut:
            self._reject()
            return
        begun = self._text[self._at :].strip()
        if self._ask.forced or not EVERYBODY.startswith(begun):
            self._begin_cut(self._likely(begun))
        else:
            self._text, self._at = "", 0


FUNCTIONARY_V31 = Family(
    name="functionary-v3.1",
    parse=FunctionaryReader,
    syntax=CallSyntax(before=FUNCTION_OPEN, middle=NAMED, after=FUNCTION_CLOSE, triggers=(FUNCTION_OPEN,)),
    marks=(("<function=", "</function>"),),
)

FUNCTIONARY_V32 = Family(
    name="functionary-v3.2",
    parse=RecipientReader,
    syntax=CallSyntax(before="", middle="\n", after="", between=f" {RECIPIENT}"),
    marks=((">>>", "recipient"),),
    always=True,
)
