"""Reads the answers of gpt-oss, which are messages to channels and recipients:

    <|channel|>analysis<|message|>The user wants the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|channel|>final<|message|>It is sunny.<|return|>

The prompt ends with `<|start|>assistant`. A message to `analysis` is a thought, a message to a function is a call;
everything else is text, even outside messages. Source: OpenAI's harmony format; chat template of openai/gpt-oss-120b.
"""

from __future__ import annotations

import re

from workers.chat.tools.family import Ask, CallSyntax, Family, ThoughtMarks
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import Gap, Reader
from workers.chat.tools.scanner import Steps, Tags

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = "analysis"
FINAL_HEADER = f"{START}assistant{CHANNEL}final{MESSAGE}"

TO = " to="
_HEADERS = Tags((START, CHANNEL, TO))
_LATER_HEADERS = Tags((START, CHANNEL))
_MESSAGE = Tags((MESSAGE,))
_ENDS = Tags((END, CALL, RETURN, START, CHANNEL))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyReader(Reader):
    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__(family, ask)
        self._gap = Gap.NONE

    def _answer(self) -> Steps[None]:
        if self._ask.opened:
            yield from self._body(ANALYSIS, "")
        headers = _HEADERS
        while (mark := (yield from self._until(headers))) is not None:
            headers = _LATER_HEADERS
            header = yield from self._header(mark)
            if header is None:
                self._reject_header(mark)
            else:
                yield from self._read(header)
            if self.is_over:
                return

    def _header(self, mark: str) -> Steps[str | None]:
        """Return a message's header; None if it is not complete. Its text is neither passed on nor dropped yet."""
        found = yield from self._up_to(_MESSAGE)
        return None if found is None else mark + found[0]

    def _reject_header(self, mark: str) -> None:
        """Pass on as text what looked like a header. One cut off by the token limit begins a call, or is dropped."""
        recipient = _RECIPIENT.search(mark + (self._short or ""))
        name = self._likely(recipient.group(1)) if recipient is not None else ""
        is_known = self._is_name(name, known=True)
        if self._is_cut and (is_known or (mark == TO and self._ask.forced)):
            self._begin_cut(name if is_known else "")
        elif self._is_cut and mark in (START, CHANNEL):
            self._text, self._at = "", 0
        else:
            self._reject()

    def _read(self, header: str) -> Steps[None]:
        """Read one message after its `header`, whose text has been neither passed on nor dropped so far."""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._is_name(recipient.group(1), known=True):
            self._begin(recipient.group(1))
            self._drop()
            yield from self._function_call()
            self.is_over = self._ask.one_call
        else:
            yield from self._body(channel.group(1) if channel is not None else "", self._text[: self._at])

    def _body(self, channel: str, header: str) -> Steps[None]:
        thinking = channel == ANALYSIS
        if thinking and not self._ask.split:
            self._reject()
        else:
            self._drop()
        self._reasons = None
        end = yield from self._until(_ENDS, thinking=thinking and self._ask.split)
        if end in (START, CHANNEL):
            self._at = 0  # a message that was not ended: the next one's header begins here
        elif thinking and not self._ask.split:
            self._reject()
        else:
            self._drop()

    def _function_call(self) -> Steps[None]:
        if not (yield from self._sees("{")):
            self._add("" if self._is_cut else "{}")
        else:
            self._drop()
            yield from self._arguments(JsonText())
        end = yield from self._any_mark(_ENDS)
        if end in (START, CHANNEL):
            self._at -= len(end or "")
        elif self._is_cut:
            self._at = len(self._text)
        self._drop()


HARMONY = Family(
    name="harmony",
    parse=HarmonyReader,
    syntax=CallSyntax(
        lead=f"{START}assistant",
        before=f"{CHANNEL}commentary  to=functions.",
        middle=f" {CONSTRAIN}json{MESSAGE}",
        after="",
        between=CALL,
        triggers=(f"{CHANNEL}commentary to=functions.",),
        answer=f"{CHANNEL}final{MESSAGE}",
    ),
    marks=(("<|channel|>", "<|message|>", "analysis"),),
    controls=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    thought=ThoughtMarks(f"{CHANNEL}{ANALYSIS}{MESSAGE}", END, anywhere=True, closing=f"{END}{FINAL_HEADER}"),
    always=True,
)
