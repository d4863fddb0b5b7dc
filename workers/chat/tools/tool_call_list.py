"""Reads tool calls that are a JSON list after a mark: Granite 3's, Phi-4-mini's, Nemotron Nano 2's, and `functools`.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>
    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Sources: the chat templates of ibm-granite/granite-3.3, microsoft/Phi-4-mini-instruct, nvidia/Nemotron-Nano-v2 and
fireworks-ai/llama-3-firefunction-v2. Granite writes its answer between <response> and </response> when it thinks.
"""

from __future__ import annotations

from dataclasses import replace

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.reader import MarkedJsonReader

OPEN = "<|tool_call|>"
CLOSE = "<|/tool_call|>"
NEMOTRON_OPEN, NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
FUNCTOOLS = "functools"


class ListReader(MarkedJsonReader):
    openers: tuple[str, ...] = (OPEN,)
    bare: tuple[str, ...] = (FUNCTOOLS,)
    closers: tuple[str, ...] = (CLOSE,)


class GraniteReader(ListReader):
    silent: tuple[str, ...] = ("<response>", "</response>")


class NemotronReader(MarkedJsonReader):
    openers = (NEMOTRON_OPEN,)
    closers = (NEMOTRON_CLOSE,)


_SYNTAX = CallSyntax(
    open=f"{OPEN} [ ",
    before='{ "name": "',
    middle='" , "arguments": ',
    after=" }",
    between=" , ",
    close=" ]",
    triggers=(OPEN,),
)

GRANITE = Family(name="granite", parse=GraniteReader, syntax=_SYNTAX, marks=((OPEN, "Granite"),), controls=(OPEN,))

PHI4 = Family(
    name="phi4",
    parse=ListReader,
    syntax=replace(_SYNTAX, close=f" ] {CLOSE}"),
    marks=(("<|tool|>", "<|/tool|>"), (OPEN,)),
    controls=(OPEN, CLOSE),
)

FUNCTOOLS_FAMILY = Family(
    name="functools",
    parse=ListReader,
    syntax=replace(_SYNTAX, open=f"{FUNCTOOLS} [ ", triggers=(f"{FUNCTOOLS}[",)),
    marks=((FUNCTOOLS,),),
)

NEMOTRON = Family(
    name="nemotron",
    parse=NemotronReader,
    syntax=replace(_SYNTAX, open=f"{NEMOTRON_OPEN} [ ", close=f" ] {NEMOTRON_CLOSE}", triggers=(NEMOTRON_OPEN,)),
    marks=((NEMOTRON_OPEN,),),
)
