"""Reads the tool calls of Cohere's Command models, a list of actions:

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>

Command-R and R+ write `Action:` and a Markdown fence around the list instead. Source: the chat templates of
CohereForAI/c4ai-command-r7b-12-2024 and CohereForAI/c4ai-command-r-plus.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.reader import MarkedJsonReader
from workers.chat.tools.scanner import Steps

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
SILENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
ACTION, FENCE, FENCE_END = "Action:", "```json", "```"


class CommandReader(MarkedJsonReader):
    openers: tuple[str, ...] = (OPEN,)
    closers: tuple[str, ...] = (CLOSE,)
    silent: tuple[str, ...] = SILENT


class CommandRReader(MarkedJsonReader):
    openers: tuple[str, ...] = (ACTION,)
    closers: tuple[str, ...] = (FENCE_END,)

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._mark(FENCE)):
            return False
        return (yield from super()._call(mark))


COMMAND_R7B = Family(
    name="command-r7b",
    parse=CommandReader,
    syntax=CallSyntax(
        open=f"{OPEN} [ ",
        before='{ "tool_name": "',
        middle='" , "parameters": ',
        after=" }",
        between=" , ",
        close=f" ] {CLOSE}",
        triggers=(OPEN,),
    ),
    marks=((OPEN,),),
    controls=(OPEN, CLOSE, *SILENT),
    calls_end_thoughts=True,
)

COMMAND_R = Family(
    name="command-r",
    parse=CommandRReader,
    syntax=CallSyntax(
        open=f"{ACTION} {FENCE} [ ",
        before='{ "tool_name": "',
        middle='" , "parameters": ',
        after=" }",
        between=" , ",
        close=f" ] {FENCE_END}",
        triggers=(f"{ACTION}\n{FENCE}",),
    ),
    marks=(("Action:", "tool_name", "<|START_OF_TURN_TOKEN|>"),),
)
