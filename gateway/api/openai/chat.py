"""Writes OpenAI's chat completions: as the chunks of a stream, and as one whole object.

Sources: OpenAI's API reference, "The chat completion object" and "The chat completion chunk object";
`reasoning_content`, `timings`, `prompt_progress` and `tokens` are llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.http.answers import JSON, EncodedArray
from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from gateway.api.openai.requests import ChatRequest
from gateway.api.openai.writing import (
    ChoiceWriter,
    ChunkEncoder,
    ChunkWriter,
    StreamUsage,
    Verbose,
    WholeChoices,
    chat_id,
)
from gateway.api.parameters.custom_tools import CUSTOM, InputReader
from gateway.api.shapes import progress_fields, usage_object
from gateway.call import Call
from gateway.dispatch.fan_out import usage_of
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Reasoning,
    Settings,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
    ToolCallDelta,
)
from workers.protocol.requests import GenerateRequest

_encode = msgspec.json.Encoder().encode


def chunk_writer(asked: ChatRequest, call: Call, request_log: RequestLog) -> ChunkWriter:
    """Return the writer of a streamed chat."""
    usage = StreamUsage(asked.usage, len(asked.requests), num_prompts=1, is_foretold=_is_foretold(asked))
    head = ChunkEncoder(chat_id(), "chat.completion.chunk", call.alias, usage)
    choices = [_ChatChoice(head, usage, number, one, asked) for number, one in enumerate(asked.requests)]
    idle = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
    return ChunkWriter(head, choices, idle, request_log)


def _is_foretold(asked: ChatRequest) -> bool:
    """Return whether the caller sent a prediction of the answer."""
    return bool(asked.requests[0].speculation.prediction)


class _ChatChoice(ChoiceWriter):
    """Writes the chunks of one answer of a chat."""

    def __init__(
        self, head: ChunkEncoder, usage: StreamUsage, number: int, request: GenerateRequest, asked: ChatRequest
    ) -> None:
        super().__init__(head, usage, number, request, Verbose(request, wanted=asked.verbose, stream=True))
        self._logprobs = LogprobsCollector(request.post_sampling_probs)
        self._as_function = asked.as_function
        self._custom = asked.custom_tools
        self._inputs: dict[int, InputReader] = {}
        """Number of a call of a custom tool -> the reader of its input."""
        self._logprobs_head = b'},"logprobs":{"content":'
        self._call = -1
        """Number of the tool call for which `_arguments_head` and `_arguments_tail` are encoded; -1: none."""
        self._arguments_head, self._arguments_tail = b"", b""
        self.frame()

    def frame(self) -> None:
        self._text_head, self._text_tail = self._frame_delta(b'{"content":', b"}")
        self._thought_head, _ = self._frame_delta(b'{"reasoning_content":', b"}")
        _, self._logprobs_tail = self._head.framed(b"", b',"refusal":null},"finish_reason":null}')

    def opening(self) -> bytes:
        return self.chunk({"role": "assistant", "content": ""})

    def one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                return self.text(event)
            case Reasoning():
                self._usage.thought(self._number, event.num_tokens)
                if self._plain:
                    return self._thought_head + _encode(event.text) + self._text_tail
                return self.chunk({"reasoning_content": event.text}, event.num_tokens)
            case ToolCallDelta():
                return self._tool_call(event)
            case Logprobs():
                self._plain = False
                self._logprobs.add(event)
                return b""
            case Tokens() | TimingsSoFar():
                self._keep(event)
                return b""
            case Progress():
                return self.chunk({}, extra=progress_fields(event, timings=self._tells_timings))
            case Started():
                self._usage.started(self._number, event)
                return b""
            case Settings():
                self._verbose.note(event)
                return b""
            case Finished():
                return self._end(event)
            case _:
                return b""

    def text(self, event: Text) -> bytes:
        if self._plain:
            return self._text_head + _encode(event.text) + self._text_tail
        if self._counts or self._tokens or self._timings is not None:
            return self.chunk({"content": event.text}, event.num_tokens)
        # Text with probabilities and nothing else is frequent, so its chunk is joined from encoded pieces.
        self._plain = True
        return (
            self._text_head
            + _encode(event.text)
            + self._logprobs_head
            + _encode(self._logprobs.take())
            + self._logprobs_tail
        )

    def _frame_delta(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return the bytes before and after a plain chunk's text. Its delta is `before` + text + `after`."""
        index = b'{"index":%d,"delta":' % self._number
        return self._head.framed(index + before, after + b',"logprobs":null,"finish_reason":null}')

    def chunk(
        self, delta: dict[str, Any], num_tokens: int = 0, finish_reason: str | None = None, extra: bytes = b""
    ) -> bytes:
        """Return a chunk with `delta`, made from `num_tokens` tokens. `extra`: more fields of the chunk, as JSON."""
        if self._counts:
            self._usage.generated(self._number, num_tokens)
        choice: dict[str, Any] = {"index": self._number, "delta": delta}
        # Probabilities left at the end are of tokens that made no text (end token, stop string): they are not written.
        is_told = self._logprobs and finish_reason is None
        choice["logprobs"] = logprobs_object(self._logprobs.take()) if is_told else None
        choice["finish_reason"] = finish_reason
        return self._complete(choice, extra)

    def _tool_call(self, event: ToolCallDelta) -> bytes:
        if event.name in self._custom:
            self._inputs[event.index] = InputReader()
        if event.index in self._inputs:
            return self._custom_call(event, self._inputs[event.index])
        if not self._as_function:
            if event.id or event.name or not self._plain:
                return self.chunk({"tool_calls": [_tool_call_delta(event)]}, event.num_tokens)
            if event.index != self._call:
                self._call = event.index
                before = b'{"tool_calls":[{"index":%d,"function":{"arguments":' % event.index
                self._arguments_head, self._arguments_tail = self._frame_delta(before, b"}}]}")
            return self._arguments_head + _encode(event.arguments) + self._arguments_tail
        if event.index:
            return b""  # the older form has room for one call
        name = {"name": event.name} if event.name else {}
        return self.chunk({"function_call": {**name, "arguments": event.arguments}}, event.num_tokens)

    def _custom_call(self, event: ToolCallDelta, reader: InputReader) -> bytes:
        text = reader.feed(event.arguments)
        if event.name:
            delta = {"id": event.id, "type": CUSTOM, CUSTOM: {"name": event.name, "input": text}}
        elif text:
            delta = {CUSTOM: {"input": text}}
        else:
            if self._counts:
                self._usage.generated(self._number, event.num_tokens)
            return b""
        return self.chunk({"tool_calls": [{"index": event.index, **delta}]}, event.num_tokens)

    def _end(self, event: Finished) -> bytes:
        rests = {index: reader.end() for index, reader in self._inputs.items()}
        calls = [{"index": index, CUSTOM: {"input": rest}} for index, rest in rests.items() if rest]
        said = self.chunk({"tool_calls": calls}) if calls else b""
        extra = self._head.end(self._number, event, self._verbose)
        return said + self.chunk({}, finish_reason=finish_reason(event, as_function=self._as_function), extra=extra)


def finish_reason(end: Finished, *, as_function: bool) -> str:
    if as_function and end.reason is FinishReason.TOOL_CALLS:
        return "function_call"
    return end.reason.value


def _tool_call_delta(event: ToolCallDelta) -> dict[str, Any]:
    """Return one delta of a tool call. The first has the call's id and name, the later ones only arguments."""
    if event.id or event.name:
        function = {"name": event.name, "arguments": event.arguments}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    return {"index": event.index, "function": {"arguments": event.arguments}}


class WholeWriter:
    """Collects all answers of one request from the events."""

    content_type = JSON

    def __init__(self, asked: ChatRequest, call: Call, request_log: RequestLog) -> None:
        self._model = call.alias
        self._request_log = request_log
        self._is_foretold = _is_foretold(asked)

        def choice(number: int) -> _WholeChoice:
            one = asked.requests[number]
            return _WholeChoice(one, Verbose(one, wanted=asked.verbose, stream=False), asked)

        self._whole = WholeChoices(choice, len(asked.requests))

    def add(self, events: list[CallEvent], choice: int) -> None:
        self._whole.add(events, choice)

    def parts(self) -> Iterator[bytes]:
        """Yield the `chat.completion` object as JSON."""
        num_thought = sum(choice.num_thought for choice in self._whole.choices)
        usage = usage_object(usage_of(self._whole.ends, 1), num_thought, is_foretold=self._is_foretold)
        return self._whole.written(chat_id(), "chat.completion", self._model, usage, self._request_log.fingerprint)


@dataclass(slots=True)
class _ToolCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def function(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": "".join(self.arguments)}

    def object(self, custom: frozenset[str]) -> dict[str, Any]:
        if self.name not in custom:
            return {"id": self.id, "type": "function", "function": self.function()}
        reader = InputReader()
        text = reader.feed("".join(self.arguments)) + reader.end()
        return {"id": self.id, "type": CUSTOM, CUSTOM: {"name": self.name, "input": text}}


class _WholeChoice:
    """Collects one answer from its events."""

    def __init__(self, request: GenerateRequest, verbose: Verbose, asked: ChatRequest) -> None:
        self.num_thought = 0
        self._verbose = verbose
        self._as_function, self._custom = asked.as_function, asked.custom_tools
        self._logprobs = LogprobsCollector(request.post_sampling_probs)
        self._content: list[bytes] | None = [] if request.n_probs else None
        """Probabilities, encoded as they come: encoding all at the end blocked other streams. None: not wanted."""
        self._tokens: list[int] | None = [] if "tokens" in request.tell else None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, _ToolCall] = {}
        self.end: Finished | None = None

    def add(self, event: CallEvent) -> None:
        match event:
            case Text():
                self._texts.append(event.text)
            case Reasoning():
                self._thoughts.append(event.text)
                self.num_thought += event.num_tokens
            case ToolCallDelta():
                call = self._calls.setdefault(event.index, _ToolCall(event.id, event.name))
                call.arguments.append(event.arguments)
            case Settings():
                self._verbose.note(event)
            case Logprobs():
                self._logprobs.add(event)
            case Tokens() if self._tokens is not None:
                self._tokens += event.tokens
            case Finished():
                self.end = event
        if self._content is not None and isinstance(event, Text | Reasoning | ToolCallDelta):
            self._content += map(_encode, self._logprobs.take())

    def verbose(self, end: Finished) -> dict[str, Any]:
        return self._verbose.fields(end)

    def object(self, number: int, end: Finished) -> dict[str, Any]:
        content = None if self._content is None else EncodedArray(self._content)
        logprobs = None if content is None else logprobs_object(content)
        reason = finish_reason(end, as_function=self._as_function)
        choice = {"index": number, "message": self._message(), "logprobs": logprobs, "finish_reason": reason}
        if self._tokens is not None:
            choice["tokens"] = self._tokens
        return choice

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            calls = [call for _, call in sorted(self._calls.items())]
            message["content"] = message["content"] or None
            if self._as_function:
                message["function_call"] = calls[0].function()
            else:
                message["tool_calls"] = [call.object(self._custom) for call in calls]
        return message
