"""Reads tool calls that are one JSON list after a mark: Granite 3's, Nemotron Nano 2's, Phi-4-mini's, Mistral's,
Command R's and `functools`.
"""

from __future__ import annotations

import secrets
import string

from workers.chat.tools.family import CallSyntax, Family, list_syntax
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import MarkedJsonReader, Reader
from workers.chat.tools.scanner import Steps, Tags

LIST_OPEN = "<|tool_call|>"
LIST_CLOSE = "<|/tool_call|>"
NEMOTRON_OPEN, NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
FUNCTOOLS = "functools"


class ListReader(MarkedJsonReader):
    """Reads the calls of Granite 3, Nemotron Nano 2, Phi-4-mini and `functools`, whose marks differ.

        <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
        <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>
        functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]

    Sources: the chat templates of ibm-granite/granite-3.3, microsoft/Phi-4-mini-instruct, nvidia/Nemotron-Nano-v2 and
    fireworks-ai/llama-3-firefunction-v2. Granite writes its answer between <response> and </response> when it thinks.
    """

    openers: tuple[str, ...] = (LIST_OPEN,)
    bare: tuple[str, ...] = (FUNCTOOLS,)
    closers: tuple[str, ...] = (LIST_CLOSE,)


class GraniteReader(ListReader):
    silent: tuple[str, ...] = ("<response>", "</response>")


class NemotronReader(MarkedJsonReader):
    openers = (NEMOTRON_OPEN,)
    closers = (NEMOTRON_CLOSE,)


GRANITE = Family(
    name="granite",
    parse=GraniteReader,
    syntax=list_syntax(LIST_OPEN),
    marks=((LIST_OPEN, "Granite"),),
    controls=(LIST_OPEN,),
)

PHI4 = Family(
    name="phi4",
    parse=ListReader,
    syntax=list_syntax(LIST_OPEN, LIST_CLOSE),
    marks=(("<|tool|>", "<|/tool|>"), (LIST_OPEN,)),
    controls=(LIST_OPEN, LIST_CLOSE),
)

FUNCTOOLS_FAMILY = Family(
    name="functools",
    parse=ListReader,
    syntax=list_syntax(FUNCTOOLS, trigger=f"{FUNCTOOLS}["),
    marks=((FUNCTOOLS,),),
)

NEMOTRON = Family(
    name="nemotron",
    parse=NemotronReader,
    syntax=list_syntax(NEMOTRON_OPEN, NEMOTRON_CLOSE),
    marks=((NEMOTRON_OPEN,),),
)


CALLS_OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARS = 9

_AFTER_NAME = Tags((CALL_ID, ARGS, "{"))
_AFTER_ID = Tags((ARGS,))


class MistralReader(Reader):
    """Reads the calls of Mistral's models: until 2024 a JSON list, with or without ids; in later models each call
    has its own marks.

        [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
        [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
        [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}

    All three forms are read, whichever the template shows. Ids are nine letters or digits: the templates refuse other
    ids. Source: the chat templates of Mistral-Nemo-Instruct-2407, Mistral-Small-3.2-24B-Instruct-2506,
    Ministral-3-14B-Reasoning-2512."""

    openers: tuple[str, ...] = (CALLS_OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        if (yield from self._sees("[")) or (yield from self._sees("{")):
            return (yield from self._json_calls())
        found = yield from self._name_up_to(_AFTER_NAME)
        if found is None or not self._is_name(found[0].strip()):
            return False
        (name, mark), id = found, ""
        if mark == CALL_ID:
            told = yield from self._up_to(_AFTER_ID)
            if told is None:
                return False
            id = told[0].strip()
        if mark == "{":
            self._at -= 1
        if not (yield from self._sees("{")):
            return False
        self._begin(name.strip(), id if _is_id(id) else "")
        self._drop()
        yield from self._arguments(JsonText())
        return True

    def _new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARS))


def _is_id(text: str) -> bool:
    return len(text) == ID_CHARS and text.isascii() and text.isalnum()


MISTRAL = Family(
    name="mistral",
    parse=MistralReader,
    syntax=CallSyntax(before=CALLS_OPEN, middle=ARGS, after="", between="", triggers=(CALLS_OPEN,)),
    marks=((CALLS_OPEN, ARGS),),
    controls=(CALLS_OPEN, CALL_ID, ARGS),
    calls_end_thoughts=True,
)

MISTRAL_LIST = Family(
    name="mistral-list",
    parse=MistralReader,
    syntax=list_syntax(CALLS_OPEN),
    marks=((CALLS_OPEN,),),
    controls=(CALLS_OPEN, CALL_ID, ARGS),
    calls_end_thoughts=True,
)


ACTIONS_OPEN, ACTIONS_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
SILENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
ACTION, FENCE, FENCE_END = "Action:", "```json", "```"


class CommandReader(MarkedJsonReader):
    """Reads the calls of Cohere's Command models, which are a list of actions.

        <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_time", "parameters": {"city": "Rome"}}]<|END_ACTION|>

    Source: the chat template of CohereForAI/c4ai-command-r7b-12-2024."""

    openers: tuple[str, ...] = (ACTIONS_OPEN,)
    closers: tuple[str, ...] = (ACTIONS_CLOSE,)
    silent: tuple[str, ...] = SILENT


class CommandRReader(MarkedJsonReader):
    """Reads the calls of Command-R and R+, which are `Action:` and a list of actions in a Markdown fence.

    Source: the chat template of CohereForAI/c4ai-command-r-plus."""

    openers: tuple[str, ...] = (ACTION,)
    closers: tuple[str, ...] = (FENCE_END,)

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._mark(FENCE)):
            return False
        return (yield from super()._call(mark))


COMMAND_R7B = Family(
    name="command-r7b",
    parse=CommandReader,
    syntax=list_syntax(ACTIONS_OPEN, ACTIONS_CLOSE, name="tool_name", arguments="parameters"),
    marks=((ACTIONS_OPEN,),),
    controls=(ACTIONS_OPEN, ACTIONS_CLOSE, *SILENT),
    calls_end_thoughts=True,
)

COMMAND_R = Family(
    name="command-r",
    parse=CommandRReader,
    syntax=list_syntax(
        f"{ACTION} {FENCE}", FENCE_END, trigger=f"{ACTION}\n{FENCE}", name="tool_name", arguments="parameters"
    ),
    marks=(("Action:", "tool_name", "<|START_OF_TURN_TOKEN|>"),),
)
