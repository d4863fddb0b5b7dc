"""Tool calls as Hermes, Qwen and many after them write them:

    <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>

Source of the format: NousResearch/Hermes-Function-Calling. Apriel's are a list between <tool_calls> and </tool_calls>.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.marked_json import MarkedJsonReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
LIST_OPEN = "<tool_calls>"
LIST_CLOSE = "</tool_calls>"


class HermesReader(MarkedJsonReader):
    openers: tuple[str, ...] = (OPEN, LIST_OPEN)
    closers: tuple[str, ...] = (CLOSE, LIST_CLOSE)


HERMES = Family(
    name="hermes",
    parse=HermesReader,
    syntax=CallSyntax(
        before=f'{OPEN} {{ "name": "', middle='" , "arguments": ', after=f" }} {CLOSE}", triggers=(OPEN,)
    ),
    marks=((OPEN,), (LIST_OPEN,)),
    controls=(OPEN, CLOSE, LIST_OPEN, LIST_CLOSE),
)
