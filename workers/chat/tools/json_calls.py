"""Reads tool calls that are JSON objects after a mark: those of Hermes, Qwen, GigaChat, Gemma 4 and most others.

Models of no known family (`PLAIN`) are read like Hermes: if their template can't show tools, the prompt asks them to
write calls as Hermes does; otherwise most of them begin with JSON without marks, which is read as a call, too.
"""

from __future__ import annotations

from dataclasses import replace

from workers.chat.tools.family import CallSyntax, Family, exact
from workers.chat.tools.json_text import GEMMA_QUOTE, JsonText
from workers.chat.tools.reader import MarkedJsonReader, Reader
from workers.chat.tools.scanner import Steps, Tags

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
LIST_OPEN = "<tool_calls>"
LIST_CLOSE = "</tool_calls>"
FENCE, FENCE_END = "```json", "```"


class HermesReader(MarkedJsonReader):
    """Reads calls in the form of Hermes, Qwen and many later models.

        <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>

    Apriel's calls are a list between <tool_calls> and </tool_calls>. Small models forget the marks: an answer that
    begins with such JSON is a call too if the JSON names a tool. The JSON can be one object, a list, several objects in
    sequence, or inside a Markdown fence. If it names no tool, it is text. Source: NousResearch/Hermes-Function-Calling.
    """

    openers: tuple[str, ...] = (OPEN, LIST_OPEN)
    closers: tuple[str, ...] = (CLOSE, LIST_CLOSE)
    bare: tuple[str, ...] = ("{", "[", FENCE)

    def _call(self, mark: str) -> Steps[bool]:
        if mark not in HermesReader.bare:
            return (yield from super()._call(mark))
        if mark != FENCE:
            self._at = 0
        if not (yield from self._json_calls(known=True)):
            return False
        yield from self._mark(FENCE_END if mark == FENCE else ";")
        return True


HERMES = Family(
    name="hermes",
    parse=HermesReader,
    syntax=CallSyntax(
        before=f'{OPEN} {{ "name": "', middle='" , "arguments": ', after=f" }} {CLOSE}", triggers=(OPEN,)
    ),
    marks=((OPEN,), (LIST_OPEN,)),
    controls=(OPEN, CLOSE, LIST_OPEN, LIST_CLOSE),
)


PLAIN = replace(HERMES, name="json", marks=())


GIGACHAT_OPEN = "<|function_call|>"
GIGACHAT_SEPARATOR = "<|message_sep|>"
GIGACHAT_ROLE = "function call<|role_sep|>\n"


class GigaChatReader(MarkedJsonReader):
    """Reads the calls of GigaChat 3, which are JSON after a mark; in version 3.1 the mark is one token.

        <|message_sep|>

        function call<|role_sep|>
        {"name": "get_weather", "arguments": {"city": "Paris"}}

        <|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}

    Source: the chat templates of ai-sage/GigaChat3-10B-A1.8B and GigaChat3.1-10B-A1.8B."""

    openers = (GIGACHAT_OPEN, GIGACHAT_ROLE)
    silent = (GIGACHAT_SEPARATOR,)


GIGACHAT = Family(
    name="gigachat",
    parse=GigaChatReader,
    syntax=CallSyntax(
        before=f'{GIGACHAT_OPEN}{{ "name": "', middle='" , "arguments": ', after=" }", triggers=(GIGACHAT_OPEN,)
    ),
    marks=((GIGACHAT_OPEN,),),
    controls=(GIGACHAT_OPEN, GIGACHAT_SEPARATOR, "<|role_sep|>"),
)

GIGACHAT_30 = Family(
    name="gigachat-3.0",
    parse=GigaChatReader,
    syntax=CallSyntax(
        lead=f"{GIGACHAT_SEPARATOR}\n\n",
        before=f'{exact(GIGACHAT_ROLE)}{{ "name": "',
        middle='" , "arguments": ',
        after=" }",
        triggers=(GIGACHAT_ROLE,),
    ),
    marks=(("function call", "<|role_sep|>"),),
    controls=(GIGACHAT_SEPARATOR, "<|role_sep|>"),
)


GEMMA_OPEN, GEMMA_CALL, GEMMA_CLOSE = "<|tool_call>", "call:", "<tool_call|>"
GEMMA_RESPONSE = "<|tool_response>"
"""The mark that the model writes after its calls, to end its turn."""

_AFTER_NAME = Tags(("{",))


class Gemma4Reader(Reader):
    """Reads the calls of Gemma 4, whose arguments are an object with special quotes and with names without quotes.

        <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

    Source: the chat template of google/gemma-4-31B-it."""

    openers: tuple[str, ...] = (GEMMA_OPEN,)
    silent: tuple[str, ...] = (GEMMA_RESPONSE,)

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._mark(GEMMA_CALL)):
            return False
        found = yield from self._name_up_to(_AFTER_NAME)
        if found is None or not self._is_name(found[0].strip()):
            return False
        self._at -= 1
        self._begin(found[0].strip())
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(GEMMA_CLOSE)
        return True


GEMMA4 = Family(
    name="gemma4",
    parse=Gemma4Reader,
    syntax=CallSyntax(
        before=f"{GEMMA_OPEN}{GEMMA_CALL}", middle="", after=GEMMA_CLOSE, between="", triggers=(GEMMA_OPEN,)
    ),
    marks=((GEMMA_OPEN, GEMMA_CALL),),
    controls=(GEMMA_OPEN, GEMMA_CLOSE, GEMMA_RESPONSE, GEMMA_QUOTE, "<|channel>"),
    calls_end_thoughts=True,
)
