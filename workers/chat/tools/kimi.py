"""Reads the tool calls of Kimi K2:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

The text before the arguments is the call's id; the model counts its calls in it, so callers get it unchanged. Source:
the chat template of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

from workers.chat.tools.family import Ask, CallSyntax, Family
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps, Tags

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

FUNCTIONS = "functions."

_ARGUMENTS = Tags((ARGUMENTS,))


class KimiReader(Reader):
    openers: tuple[str, ...] = (OPEN, CALL)

    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__(family, ask)
        self._ids: set[str] = set()

    def _call(self, mark: str) -> Steps[bool]:
        if mark == OPEN and not (yield from self._mark(CALL)):
            return False
        return (yield from self._listed(self._one, CALL, CLOSE))

    def _one(self) -> Steps[bool]:
        found = yield from self._up_to(_ARGUMENTS)
        if found is None:
            self._name = self._likely(_begun_name(self._short or ""))
            return False
        id = found[0].strip()
        name = self._name = id.removeprefix(FUNCTIONS).rpartition(":")[0] or id
        if not self._is_name(name) or not (yield from self._sees("{")):
            return False
        self._begin(name, self._own(id))
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(CALL_END)
        return True

    def _own(self, id: str) -> str:
        """Return the id, or an empty one if an earlier call of this answer has it."""
        if id in self._ids:
            return ""
        self._ids.add(id)
        return id


def _begun_name(id: str) -> str:
    """Return the part of the name in an id that was cut off."""
    name = "" if FUNCTIONS.startswith(id) else id.removeprefix(FUNCTIONS)
    return name.rpartition(":")[0] or name


KIMI = Family(
    name="kimi-k2",
    parse=KimiReader,
    syntax=CallSyntax(
        open=OPEN,
        before=f"{CALL}functions.",
        middle=f":0{ARGUMENTS}",
        after=CALL_END,
        between="",
        close=CLOSE,
        triggers=(OPEN,),
    ),
    marks=((OPEN,),),
    controls=(OPEN, CLOSE, CALL, ARGUMENTS, CALL_END),
    calls_end_thoughts=True,
)
