"""Reads the tool calls of DeepSeek R1, V3 and V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes the name before the separator and the arguments after it, without a fence. Both forms are read whatever the
template shows, and Hermes' too: these templates can't show tools, and models are told to answer so. Source: the chat
templates of deepseek-ai/DeepSeek-R1 and deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.hermes import HermesReader
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.scanner import Steps, Tags

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"
KIND = "function"
"""The word that the older form has before the separator."""

_SEPARATOR = Tags((SEPARATOR,))
_AFTER_NAME = Tags((FENCE, "{"))


class DeepSeekReader(HermesReader):
    openers: tuple[str, ...] = (OPEN, CALL, *HermesReader.openers)
    thought_ends = (OPEN, CALL)

    def _call(self, mark: str) -> Steps[bool]:
        if mark not in (OPEN, CALL):
            return (yield from super()._call(mark))
        if mark == OPEN and not (yield from self._mark(CALL)):
            return False
        return (yield from self._listed(self._one, CALL, CLOSE))

    def _one(self) -> Steps[bool]:
        found = yield from self._name_up_to(_SEPARATOR)
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
        yield from self._mark(CALL_END)
        return True


_CONTROLS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END)

DEEPSEEK = Family(
    name="deepseek",
    parse=DeepSeekReader,
    syntax=CallSyntax(
        open=OPEN,
        before=f"{CALL}function{SEPARATOR}",
        middle=f"\n{FENCE}\n",
        after=f" {FENCE_END}{CALL_END}",
        close=CLOSE,
        triggers=(OPEN,),
    ),
    marks=((OPEN, FENCE),),
    controls=_CONTROLS,
    calls_end_thoughts=True,
)

DEEPSEEK_V31 = Family(
    name="deepseek-v3.1",
    parse=DeepSeekReader,
    syntax=CallSyntax(
        open=OPEN, before=CALL, middle=SEPARATOR, after=CALL_END, between="", close=CLOSE, triggers=(OPEN,)
    ),
    marks=((OPEN,),),
    controls=_CONTROLS,
    calls_end_thoughts=True,
)
