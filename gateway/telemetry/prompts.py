"""Logs prompts and answers, only if an operator has asked for that (`log_prompts`). For each answer:

heard = prompts.begins(call, log, request)  begins to record the answer
answer = heard.of(answer)                   wraps the answer: events that are read from it are recorded
heard.ends()                                logs one line about the answer, however it ended
"""

from __future__ import annotations

import logging
from functools import partial

from gateway.call import Answer, Call, Push, Pushed
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.request_log import ids_of
from workers.protocol.events import CallEvent, Failed, Finished, Reasoning, Text, ToolCallDelta
from workers.protocol.framing import encode
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest

log = logging.getLogger("paddock.prompts")

MAX_CHARS = 16_384
"""Maximum characters that are logged of a prompt, and of each part of an answer; the middle of longer texts is left
out."""

WARNING = (
    "prompts and answers are written into the log, at level info (log_prompts): whoever may read it reads what every "
    "team asks; unset it when you have seen enough"
)


class Heard:
    """Follows one answer without recording anything, because prompts are not logged."""

    __slots__ = ()

    def of(self, answer: Answer) -> Answer:
        return answer

    def ends(self) -> None:
        """Note that the answer is complete, or that there will be no answer."""


class Prompts:
    """The prompt log that logs nothing; in use unless an operator has set `log_prompts`."""

    def begins(self, call: Call, answer_log: AnswerLog, request: GenerateRequest | PoolRequest) -> Heard:
        return UNHEARD


UNHEARD = Heard()
UNWRITTEN = Prompts()


class WrittenPrompts(Prompts):
    """The prompt log that logs one line per answer, with the prompt. When created, it logs a warning about this."""

    def __init__(self) -> None:
        log.warning(WARNING)

    def begins(self, call: Call, answer_log: AnswerLog, request: GenerateRequest | PoolRequest) -> Heard:
        return Noted(call, answer_log, request)


class Noted(Heard):
    __slots__ = ("_answer_log", "_call", "_calls", "_request", "_text", "_thought")

    def __init__(self, call: Call, answer_log: AnswerLog, request: GenerateRequest | PoolRequest) -> None:
        self._call = call
        self._answer_log = answer_log
        self._request = request
        self._text, self._thought, self._calls = Excerpt(), Excerpt(), Excerpt()

    def of(self, answer: Answer) -> Answer:
        return Overheard(answer, self)

    def note(self, events: list[CallEvent]) -> None:
        for event in events:
            if isinstance(event, Text):
                self._text.add(event.text)
            elif isinstance(event, Reasoning):
                self._thought.add(event.text)
            elif isinstance(event, ToolCallDelta):
                self._calls.add(f"{event.name}{event.arguments}")

    def ends(self) -> None:
        prompt = Excerpt()
        prompt.add(_asked(self._request))
        told = {"prompt": prompt, "answer": self._text, "thought": self._thought, "tool_calls": self._calls}
        fields = {"team": self._call.principal.team, "model": self._answer_log.model}
        fields |= {name: text for name, excerpt in told.items() if (text := excerpt.text())}
        log.info("prompt", extra={"fields": ids_of(self._call.request_id, self._answer_log.trace) | fields})


class Overheard:
    """An answer that passes on the events of another answer, and records them for the log."""

    __slots__ = ("_answer", "_noted")

    def __init__(self, answer: Answer, noted: Noted) -> None:
        self._answer = answer
        self._noted = noted

    @property
    def ended(self) -> bool:
        return self._answer.ended

    @property
    def choice(self) -> int:
        return self._answer.choice

    @property
    def end(self) -> Finished | Failed | None:
        return self._answer.end

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        events = await self._answer.take(None if push is None else partial(self._pass_push, push))
        self._noted.note(events)
        return events

    def _pass_push(self, push: Push, events: list[CallEvent]) -> Pushed:
        pushed = push(events)
        if pushed is not Pushed.LEFT:
            self._noted.note(events)
        return pushed


class Excerpt:
    """The beginning and the end of a text that comes in pieces, at most `MAX_CHARS` in all."""

    __slots__ = ("_head", "_num_chars", "_tail")

    def __init__(self) -> None:
        self._head = self._tail = ""
        self._num_chars = 0

    def add(self, text: str) -> None:
        half = MAX_CHARS // 2
        self._num_chars += len(text)
        room = half - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-half:]

    def text(self) -> str:
        left_out = self._num_chars - len(self._head) - len(self._tail)
        gap = f" [{left_out} characters are left out here] " if left_out else ""
        return f"{self._head}{gap}{self._tail}"


def _asked(request: GenerateRequest | PoolRequest) -> str:
    if isinstance(request, PoolRequest):
        return encode([request.query, *request.inputs] if request.query is not None else request.inputs).decode()
    if request.messages:
        return encode(request.messages).decode()
    if isinstance(request.prompt, str):
        return request.prompt
    return encode(request.infill or request.prompt).decode()
