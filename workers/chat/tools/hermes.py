"""Tool calls as Hermes, Qwen and many after them write them:

    <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>

Source of the format: NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.reader import Reader, Steps

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesReader(Reader):
    openers = (OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._json_calls()):
            return False
        yield from self._mark(CLOSE)
        return True


HERMES = Family(
    name="hermes",
    parse=HermesReader,
    syntax=CallSyntax(
        before=f'{OPEN} {{ "name": "', middle='" , "arguments": ', after=f" }} {CLOSE}", triggers=(OPEN,)
    ),
    marks=((OPEN,),),
    controls=(OPEN, CLOSE),
)
