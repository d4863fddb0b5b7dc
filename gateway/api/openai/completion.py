"""Writes OpenAI's completions: as chunks of a stream, which are completion objects too, and as one whole object.

Source: OpenAI's API reference, "The completion object"; `timings`, `prompt_progress` and `tokens` are llama-server's
(tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.api.http.answers import JSON, EncodedArray
from gateway.api.openai.logprobs import LegacyCollector, LegacyLogprobs, LogprobsCollector, join_lists, logprobs_object
from gateway.api.openai.requests import CompletionRequest
from gateway.api.openai.writing import (
    ChoiceWriter,
    ChunkEncoder,
    ChunkWriter,
    StreamUsage,
    Verbose,
    WholeChoices,
    completion_id,
)
from gateway.api.shapes import progress_fields, usage_object
from gateway.call import Call
from gateway.dispatch.fan_out import usage_of
from gateway.telemetry.request_log import RequestLog
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


class Echo:
    """Holds the prompt that `echo` puts before an answer. A worker reports the text of a prompt sent as tokens.

    If the prompt's probabilities are wanted, the prompt is written when the probabilities of all its tokens have come.
    """

    def __init__(self, asked: CompletionRequest, number: int) -> None:
        prompt = asked.prompts[number * len(asked.prompts) // len(asked.requests)]
        self._text = prompt if asked.echo and isinstance(prompt, str) else ""
        self._by_worker = asked.echo and not isinstance(prompt, str)
        self.has_probs = bool(asked.requests[number].prompt_probs)
        self._num_tokens = 0

    def started(self, event: Started) -> str:
        """Return the prompt if it is to be written at this event; otherwise an empty text."""
        self._num_tokens = event.num_prompt_tokens
        return "" if self.has_probs else self._text

    def in_settings(self, event: Settings) -> str:
        """Return the prompt if it is to be written at this event; otherwise an empty text."""
        if self._by_worker:
            self._text = event.prompt
        return self._text if self._by_worker and not self.has_probs else ""

    def probs(self, event: PromptLogprobs, probs: Probabilities) -> str:
        """Add the event to `probs`; return the prompt if all probabilities of its tokens have come, else empty text."""
        return self._text if probs.add_prompt(event, self._num_tokens, self._text) else ""


class Probabilities:
    """Holds the probabilities of one answer's tokens until they are written, in the shape that was asked for."""

    def __init__(self, asked: CompletionRequest, request: GenerateRequest) -> None:
        self.wanted = bool(request.n_probs)
        self._legacy = LegacyCollector()
        self._modern = LogprobsCollector(request.post_sampling_probs)
        self.is_legacy = asked.legacy_logprobs
        self._tells_end = bool(request.prompt_probs)
        self._is_prompt_whole = not request.prompt_probs

    @property
    def waiting(self) -> bool:
        return self._is_prompt_whole and (bool(self._legacy) or bool(self._modern))

    @property
    def waiting_at_end(self) -> bool:
        """Whether to write, at the end, probabilities of tokens without text: programs that score texts need them."""
        return self._tells_end and self.waiting

    def add(self, event: Logprobs) -> None:
        (self._legacy if self.is_legacy else self._modern).add(event)

    def add_prompt(self, event: PromptLogprobs, num_tokens: int, text: str) -> bool:
        """Add the next of the `num_tokens` tokens of the prompt `text`; return whether all of them have come now.

        Only OpenAI's older shape has a place for a prompt's probabilities."""
        if self._legacy.add_prompt(event.tokens) < num_tokens:
            return False
        self._legacy.end_prompt(text)
        self._is_prompt_whole = True
        return True

    def take(self) -> dict[str, Any]:
        """Return the probabilities held, and hold them no longer."""
        return self._legacy.take() if self.is_legacy else logprobs_object(self._modern.take())


class WholeProbabilities:
    """Collects a whole answer's probabilities, encoded as they come: encoding all at the end blocked other streams."""

    def __init__(self, probs: Probabilities) -> None:
        self._probs = probs
        self._legacy: list[LegacyLogprobs] = []
        self._modern: list[bytes] = []

    def add_waiting(self) -> None:
        """Take what `Probabilities` holds, and collect it. Call this when the text of the tokens concerned has come."""
        if self._probs.is_legacy:
            self._legacy.append(self._probs.take())
        else:
            self._modern += map(_encode, self._probs.take()["content"])

    def object(self) -> dict[str, Any]:
        return join_lists(self._legacy) if self._probs.is_legacy else logprobs_object(EncodedArray(self._modern))


class CompletionWhole:
    """Collects all answers of one request from the events."""

    content_type = JSON

    def __init__(self, asked: CompletionRequest, call: Call, request_log: RequestLog) -> None:
        self._model = call.alias
        self._request_log = request_log
        self._num_prompts = len(asked.prompts)

        def choice(number: int) -> _WholeChoice:
            one = asked.requests[number]
            verbose = Verbose(one, wanted=asked.verbose, stream=False)
            return _WholeChoice(one, Echo(asked, number), Probabilities(asked, one), verbose)

        self._whole = WholeChoices(choice, len(asked.requests))

    def add(self, events: list[CallEvent], choice: int) -> None:
        self._whole.add(events, choice)

    def parts(self) -> Iterator[bytes]:
        """Yield the `text_completion` object as JSON."""
        usage = usage_object(usage_of(self._whole.ends, self._num_prompts))
        return self._whole.written(
            completion_id(), "text_completion", self._model, usage, self._request_log.fingerprint
        )


class _WholeChoice:
    """Collects one answer from its events."""

    def __init__(self, request: GenerateRequest, echo: Echo, probs: Probabilities, verbose: Verbose) -> None:
        self._verbose = verbose
        self._echo = echo
        self._probs = probs
        self._told = WholeProbabilities(probs)
        self._tokens: list[int] | None = [] if "tokens" in request.tell else None
        self._texts: list[str] = []
        self.end: Finished | None = None

    def add(self, event: CallEvent) -> None:
        match event:
            case Text() | Reasoning():
                self._texts.append(event.text)
                if self._probs.waiting:
                    self._told.add_waiting()
            case Started():
                self._texts.append(self._echo.started(event))
            case Settings():
                self._verbose.note(event)
                self._texts.append(self._echo.in_settings(event))
            case PromptLogprobs():
                self._texts.append(self._echo.probs(event, self._probs))
            case Logprobs():
                self._probs.add(event)
            case Tokens() if self._tokens is not None:
                self._tokens += event.tokens
            case Finished():
                self.end = event

    def verbose(self, end: Finished) -> dict[str, Any]:
        return self._verbose.fields(end)

    def object(self, number: int, end: Finished) -> dict[str, Any]:
        if self._probs.waiting_at_end:
            self._told.add_waiting()
        logprobs = self._told.object() if self._probs.wanted else None
        choice: dict[str, Any] = {"index": number, "text": "".join(self._texts), "logprobs": logprobs}
        choice["finish_reason"] = end.reason.value
        if self._tokens is not None:
            choice["tokens"] = self._tokens
        return choice


def completion_writer(asked: CompletionRequest, call: Call, request_log: RequestLog) -> ChunkWriter:
    """Return the writer of a streamed completion, which writes the answers to all its prompts."""
    usage = StreamUsage(asked.usage, len(asked.requests), len(asked.prompts))
    head = ChunkEncoder(completion_id(), "text_completion", call.alias, usage)
    choices = [_CompletionChoice(head, usage, number, one, asked) for number, one in enumerate(asked.requests)]
    idle = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
    return ChunkWriter(head, choices, idle, request_log)


class _CompletionChoice(ChoiceWriter):
    """Writes the chunks of one answer of a completion."""

    def __init__(
        self, head: ChunkEncoder, usage: StreamUsage, number: int, request: GenerateRequest, asked: CompletionRequest
    ) -> None:
        super().__init__(head, usage, number, request, Verbose(request, wanted=asked.verbose, stream=True))
        self._echo = Echo(asked, number)
        self._probs = Probabilities(asked, request)
        self.frame()

    def frame(self) -> None:
        self._text_head, self._text_tail = self._head.framed(
            b'{"index":%d,"text":' % self._number, b',"logprobs":null,"finish_reason":null}'
        )

    def opening(self) -> bytes:
        return b""

    def one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                return self.text(event)
            case Reasoning():
                return self._chunk(event.text, event.num_tokens)
            case Logprobs():
                self._plain = False
                self._probs.add(event)
                return b""
            case Tokens() | TimingsSoFar():
                self._keep(event)
                return b""
            case Progress():
                return self._chunk("", extra=progress_fields(event, timings=self._tells_timings))
            case Started():
                self._usage.started(self._number, event)
                return self._echo_chunk(self._echo.started(event))
            case Settings():
                self._verbose.note(event)
                return self._echo_chunk(self._echo.in_settings(event))
            case PromptLogprobs():
                return self._echo_chunk(self._echo.probs(event, self._probs))
            case Finished():
                extra = self._head.end(self._number, event, self._verbose)
                return self._chunk("", finish_reason=event.reason.value, extra=extra)
            case _:
                return b""

    def text(self, event: Text) -> bytes:
        if self._plain:
            return self._text_head + _encode(event.text) + self._text_tail
        return self._chunk(event.text, event.num_tokens)

    def _echo_chunk(self, prompt: str) -> bytes:
        return self._chunk(prompt) if prompt else b""

    def _chunk(self, text: str, num_tokens: int = 0, finish_reason: str | None = None, extra: bytes = b"") -> bytes:
        if self._counts:
            self._usage.generated(self._number, num_tokens)
        said = finish_reason is None
        choice: dict[str, Any] = {"index": self._number, "text": text}
        is_told = self._probs.waiting if said else self._probs.waiting_at_end
        choice["logprobs"] = self._probs.take() if is_told else None
        choice["finish_reason"] = finish_reason
        return self._complete(choice, extra)
