"""Writes OpenAI's completions as the chunks of a stream, which are completion objects themselves.

Source of the shapes: OpenAI's API reference, "The completion object"; `timings`, `prompt_progress` and `tokens` are
llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.http.streaming import DONE, data
from gateway.api.openai.completion_whole import Echo, Probabilities
from gateway.api.openai.error_shape import error_body
from gateway.api.openai.requests import CompletionRequest
from gateway.api.openai.writing import StreamHead, StreamUsage, Verbose, completion_id
from gateway.api.shapes import progress_fields, timings_object
from gateway.call import Call
from gateway.errors import PaddockError
from gateway.telemetry.trail import Trail
from workers.protocol.events import (
    CallEvent,
    Finished,
    Logprobs,
    Progress,
    PromptLogprobs,
    Reasoning,
    Settings,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
)
from workers.protocol.requests import GenerateRequest

_encode = msgspec.json.Encoder().encode


class CompletionChunks:
    """Writes the chunks of one streamed request, over all prompts and answers."""

    def __init__(self, asked: CompletionRequest, call: Call, trail: Trail) -> None:
        self._trail = trail
        usage = StreamUsage(asked.usage, len(asked.requests), len(asked.prompts))
        self._head = StreamHead(completion_id(), "text_completion", call.alias, usage)
        self._choices = [
            _Choice(self._head, usage, number, asked, one, Verbose(one, wanted=asked.verbose, stream=True))
            for number, one in enumerate(asked.requests)
        ]

    def opening(self) -> bytes:
        self._head.sign(self._trail.fingerprint)
        for choice in self._choices:
            choice.frame()
        return b""

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        writer = self._choices[choice]
        if len(events) == 1:
            event = events[0]
            if type(event) is Text:
                return writer.text(event)
        return b"".join([writer.one(event) for event in events])

    def closing(self) -> bytes:
        return self._head.last() + DONE

    def idle(self) -> bytes:
        return self._head.chunk({"index": 0, "text": "", "logprobs": None, "finish_reason": None})

    def broken(self, error: PaddockError) -> bytes:
        return data(error_body(error)) + DONE


class _Choice:
    """Writes one answer's chunks. It has no reference to its writer: the two would be garbage that only cycles hold."""

    def __init__(
        self,
        head: StreamHead,
        usage: StreamUsage,
        number: int,
        asked: CompletionRequest,
        request: GenerateRequest,
        verbose: Verbose,
    ) -> None:
        self._head = head
        self._verbose = verbose
        self._usage = usage
        self._number = number
        self._echo = Echo(asked, number)
        self._probs = Probabilities(asked, request)
        self._tells_timings = "timings" in request.tell
        self._tokens: list[int] = []
        self._timings: TimingsSoFar | None = None
        self._counts = usage.always
        self._plain = not self._counts
        """Whether the next chunk tells nothing but the text."""
        self.frame()

    def frame(self) -> None:
        """Encode what frequent chunks have in common; again when the head has changed."""
        self._text_head, self._text_tail = self._head.framed(
            b'{"index":%d,"text":' % self._number, b',"logprobs":null,"finish_reason":null}'
        )

    def one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                return self.text(event)
            case Reasoning():
                return self._chunk(event.text, event.num_tokens)
            case Logprobs() | Tokens() | TimingsSoFar():
                self._keep(event)
                return b""
            case Progress():
                return self._chunk("", extra=progress_fields(event, timings=self._tells_timings))
            case Started():
                self._usage.started(self._number, event)
                return self._echoed(self._echo.started(event))
            case Settings():
                self._verbose.note(event)
                return self._echoed(self._echo.in_settings(event))
            case PromptLogprobs():
                return self._echoed(self._echo.probs(event, self._probs))
            case Finished():
                extra = self._head.end(self._number, event, self._verbose)
                return self._chunk("", finish_reason=event.reason.value, extra=extra)
            case _:
                return b""

    def text(self, event: Text) -> bytes:
        if self._plain:
            return self._text_head + _encode(event.text) + self._text_tail
        return self._chunk(event.text, event.num_tokens)

    def _echoed(self, prompt: str) -> bytes:
        return self._chunk(prompt) if prompt else b""

    def _chunk(self, text: str, num_tokens: int = 0, finish_reason: str | None = None, extra: bytes = b"") -> bytes:
        if self._counts:
            self._usage.generated(self._number, num_tokens)
        said = finish_reason is None
        choice: dict[str, Any] = {"index": self._number, "text": text}
        is_told = self._probs.waiting if said else self._probs.waiting_at_end
        choice["logprobs"] = self._probs.take() if is_told else None
        choice["finish_reason"] = finish_reason
        if self._tokens:
            choice["tokens"], self._tokens = self._tokens, []
        if self._timings is not None and said:
            extra += b',"timings":' + _encode(timings_object(self._timings.timings))
            self._timings = None
        self._plain = not self._counts
        return self._head.chunk(choice, extra)

    def _keep(self, event: Logprobs | Tokens | TimingsSoFar) -> None:
        """Keep it for the chunk of the text that follows it."""
        self._plain = False
        match event:
            case Logprobs():
                self._probs.add(event)
            case Tokens():
                self._tokens += event.tokens
            case TimingsSoFar():
                self._timings = event
