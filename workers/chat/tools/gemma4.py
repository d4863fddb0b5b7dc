"""Reads the tool calls of Gemma 4, an object with quotes of its own and names without quotes:

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Source: the chat template of google/gemma-4-31B-it.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.json_text import GEMMA_QUOTE, JsonText
from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps, Tags

OPEN, CALL, CLOSE = "<|tool_call>", "call:", "<tool_call|>"
RESPONSE = "<|tool_response>"
"""The mark with which the model ends a turn of calls."""

_AFTER_NAME = Tags(("{",))


class Gemma4Reader(Reader):
    openers: tuple[str, ...] = (OPEN,)
    silent: tuple[str, ...] = (RESPONSE,)

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._mark(CALL)):
            return False
        found = yield from self._name_up_to(_AFTER_NAME)
        if found is None or not self._is_name(found[0].strip()):
            return False
        self._at -= 1
        self._begin(found[0].strip())
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(CLOSE)
        return True


GEMMA4 = Family(
    name="gemma4",
    parse=Gemma4Reader,
    syntax=CallSyntax(before=f"{OPEN}{CALL}", middle="", after=CLOSE, between="", triggers=(OPEN,)),
    marks=((OPEN, CALL),),
    controls=(OPEN, CLOSE, RESPONSE, GEMMA_QUOTE, "<|channel>"),
    calls_end_thoughts=True,
)
