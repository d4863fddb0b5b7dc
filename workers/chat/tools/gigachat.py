"""Reads the tool calls of GigaChat 3, JSON after a mark; version 3.1 has a token for it:

    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Paris"}}

    <|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}

Source: the chat templates of ai-sage/GigaChat3-10B-A1.8B and GigaChat3.1-10B-A1.8B.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family, exact
from workers.chat.tools.reader import MarkedJsonReader

OPEN = "<|function_call|>"
SEPARATOR = "<|message_sep|>"
ROLE = "function call<|role_sep|>\n"


class GigaChatReader(MarkedJsonReader):
    openers = (OPEN, ROLE)
    silent = (SEPARATOR,)


GIGACHAT = Family(
    name="gigachat",
    parse=GigaChatReader,
    syntax=CallSyntax(before=f'{OPEN}{{ "name": "', middle='" , "arguments": ', after=" }", triggers=(OPEN,)),
    marks=((OPEN,),),
    controls=(OPEN, SEPARATOR, "<|role_sep|>"),
)

GIGACHAT_30 = Family(
    name="gigachat-3.0",
    parse=GigaChatReader,
    syntax=CallSyntax(
        lead=f"{SEPARATOR}\n\n",
        before=f'{exact(ROLE)}{{ "name": "',
        middle='" , "arguments": ',
        after=" }",
        triggers=(ROLE,),
    ),
    marks=(("function call", "<|role_sep|>"),),
    controls=(SEPARATOR, "<|role_sep|>"),
)
