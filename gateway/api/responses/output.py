"""Collects the items of an answer, and writes the response object of any status, from queued to completed.

Source: OpenAI's API reference, "The response object"; `timings` is llama-server's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from gateway.api.http.answers import JSON, EncodedArray, gathered, in_parts
from gateway.api.parameters.custom_tools import InputReader
from gateway.api.responses.items import output_id
from gateway.api.responses.records import NewRecord
from gateway.api.responses.request import ResponseRequest
from gateway.api.shapes import timings_object
from gateway.call import Call
from gateway.errors import ContextOverflow, InvalidRequest, PaddockError, QueueFull
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCallDelta,
)

INLINE_PROBS = 1_024
"""The final events of a message with more probabilities than this (some 80 KB) are written in parts."""
MAX_BRIEF_PROBS = 16_384
"""Maximum number of a message's probabilities where the message has to be in one piece: in stored responses, in streams
that may be read again, and on a WebSocket. If it has more, all of them are left out: they would be megabytes, and
writing, sending or decoding them would hold up every stream."""

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Message:
    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """The probabilities of each token, encoded once: four events at the end repeat all of them."""
    num_probs: int = 0
    """Number of probabilities in `logprobs`: of the chosen tokens, and of those listed beside them."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_long(self) -> bool:
        """Whether the message has too many probabilities to be written in one piece."""
        return self.num_probs > INLINE_PROBS

    def told(self, *, brief: bool = False) -> EncodedArray:
        """Return the probabilities. `brief`: return none if there are more than MAX_BRIEF_PROBS."""
        return EncodedArray([] if brief and self.num_probs > MAX_BRIEF_PROBS else self.logprobs)

    def part(self, *, brief: bool = False) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.told(brief=brief)}

    def object(self, status: str, *, brief: bool = False) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part(brief=brief)]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


@dataclass(slots=True)
class Thought:
    id: str
    index: int
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def object(self, status: str, *, brief: bool = False) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


@dataclass(slots=True)
class FunctionCall:
    id: str
    index: int
    call_id: str
    name: str
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the arguments of the call, as JSON text; the input of a call of a custom tool."""
        return "".join(self.texts)

    def object(self, status: str, *, brief: bool = False) -> dict[str, Any]:
        said = {"call_id": self.call_id, "name": self.name, "arguments": self.text, "status": status}
        return {"id": self.id, "type": "function_call", **said}


@dataclass(slots=True)
class CustomCall(FunctionCall):
    """A call of a custom tool, whose input is a text that is read out of the call's arguments."""

    reader: InputReader = field(default_factory=InputReader)

    def object(self, status: str, *, brief: bool = False) -> dict[str, Any]:
        said = {"call_id": self.call_id, "name": self.name, "input": self.text, "status": status}
        return {"id": self.id, "type": "custom_tool_call", **said}


OutputItem = Message | Thought | FunctionCall


class Listener(Protocol):
    """A receiver of changes: an item begins (`opened`), gets more text (`grew`, once per token) or ends (`closed`)."""

    def opened(self, item: OutputItem) -> None: ...

    def grew(self, item: OutputItem, text: str, logprobs: list[bytes]) -> None: ...

    def closed(self, item: OutputItem, status: str) -> None: ...


class Output:
    """Collects the model's thoughts, messages and tool calls as items, in the order in which they begin.

    A thought or message ends when the next item begins; tool calls, whose pieces may alternate, end with the answer."""

    def __init__(
        self,
        response_id: str,
        listener: Listener | None,
        *,
        speaks: bool = True,
        custom: frozenset[str] = frozenset(),
    ) -> None:
        """`speaks`: whether an answer without items gets an empty message. `custom`: names of the custom tools."""
        self._custom = custom
        self.items: list[OutputItem] = []
        self.end: Finished | None = None
        self.num_reasoning_tokens = 0
        self.speaking: Message | Thought | None = None
        """The message or thought that is being written; None: there is none, as while tool calls are written."""
        self._response_id = response_id
        self._speaks = speaks
        self._listener = listener
        self._calls: dict[int, FunctionCall] = {}
        self._waiting: list[Logprobs] = []
        self._statuses: dict[str, str] = {}

    def add(self, event: CallEvent) -> None:
        match event:
            case Text():
                message = self.speaking if isinstance(self.speaking, Message) else self._open_text_item("message")
                self._grow(message, event.text)
            case Reasoning():
                self.num_reasoning_tokens += event.num_tokens
                thought = self.speaking if isinstance(self.speaking, Thought) else self._open_text_item("reasoning")
                self._grow(thought, event.text)
            case ToolCallDelta():
                self._call(event)
            case Logprobs():
                self._waiting.append(event)
            case Finished():
                self._finish(event)

    def objects(self, *, brief: bool = False) -> list[dict[str, Any]]:
        """Return the items. `brief`: leave out a message's probabilities if there are more than MAX_BRIEF_PROBS."""
        statuses = [self._statuses.get(item.id, "incomplete") for item in self.items]
        return [item.object(status, brief=brief) for item, status in zip(self.items, statuses, strict=True)]

    @property
    def is_long(self) -> bool:
        """Whether a message has so many probabilities that its final events are written in parts."""
        return any(isinstance(item, Message) and item.is_long for item in self.items)

    @property
    def has_waiting(self) -> bool:
        """Whether probabilities have come of tokens whose text has not come yet."""
        return bool(self._waiting)

    def _open_text_item(self, kind: str) -> Message | Thought:
        self._close_current("completed")
        index = len(self.items)
        id_ = output_id(self._response_id, kind, index)
        self.speaking = Message(id_, index) if kind == "message" else Thought(id_, index)
        self._open(self.speaking)
        return self.speaking

    def _call(self, event: ToolCallDelta) -> None:
        call = self._calls.get(event.index)
        if call is None:
            self._close_current("completed")
            index = len(self.items)
            kind, made = "function_call", FunctionCall
            if event.name in self._custom:
                kind, made = "custom_tool_call", CustomCall
            id_ = output_id(self._response_id, kind, index)
            call = self._calls[event.index] = made(id_, index, event.id, event.name)
            self._open(call)
        more = call.reader.feed(event.arguments) if isinstance(call, CustomCall) else event.arguments
        if more:
            self._grow(call, more)

    def _finish(self, event: Finished) -> None:
        self.end = event
        status = "incomplete" if event.reason.value == "length" else "completed"
        if not self.items and self._speaks:
            self._open_text_item("message")
        self._close_current(status)
        for call in self._calls.values():
            if isinstance(call, CustomCall) and (rest := call.reader.end()):
                self._grow(call, rest)
            self._close(call, status)

    def _open(self, item: OutputItem) -> None:
        self.items.append(item)
        if self._listener is not None:
            self._listener.opened(item)

    def _grow(self, item: OutputItem, text: str) -> None:
        item.texts.append(text)
        waiting, self._waiting = self._waiting, []
        logprobs = [_encode(_logprob(one)) for one in waiting] if isinstance(item, Message) else []
        if logprobs and isinstance(item, Message):
            item.logprobs += logprobs
            item.num_probs += sum([1 + len(one.top) for one in waiting])
        if self._listener is not None:
            self._listener.grew(item, text, logprobs)

    def _close_current(self, status: str) -> None:
        if self.speaking is not None:
            self._close(self.speaking, status)
            self.speaking = None

    def _close(self, item: OutputItem, status: str) -> None:
        self._statuses[item.id] = status
        if self._listener is not None:
            self._listener.closed(item, status)


def _logprob(event: Logprobs) -> dict[str, Any]:
    return {**_token(event.chosen), "top_logprobs": [_token(token) for token in event.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.piece.decode("utf-8", "replace"), "bytes": list(token.piece), "logprob": token.logprob}


@dataclass(slots=True)
class Snapshot:
    """The parts of a response that stay the same from beginning to end."""

    asked: ResponseRequest
    call: Call
    is_kept: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_kept = self.asked.store

    def object(self, status: str, output: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self.asked.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.call.alias,
            "output": list(output),
            **self.asked.echo,
            "store": self.is_kept,
            **more,
        }

    def standing(self) -> dict[str, Any]:
        """Return the response with few fields, for the event that is sent at every step of the prefill."""
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self.asked.created_at,
            "status": "in_progress",
            "model": self.call.alias,
            "output": [],
        }

    def ended(self, output: Sequence[dict[str, Any]], end: Finished, num_reasoning_tokens: int) -> dict[str, Any]:
        cut = end.reason is FinishReason.LENGTH and self.asked.generates
        return self.object(
            "incomplete" if cut else "completed",
            output,
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=usage_object(end, num_reasoning_tokens),
            timings=timings_object(end.timings),
        )

    def failed(self, output: Sequence[dict[str, Any]], error: PaddockError) -> dict[str, Any]:
        return self.object("failed", output, error=error_object(error))


def error_object(error: PaddockError) -> dict[str, str]:
    """Return the `error` object of a failed response, with one of the few codes that the dialect has for it."""
    code = "server_error"
    if isinstance(error, ContextOverflow):
        code = error.code  # the reference does not list it, but OpenAI sends it and Codex looks for it
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    elif isinstance(error, QueueFull):
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}


def usage_object(end: Finished, num_reasoning_tokens: int) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class WholeWriter:
    """Writes a response that is not streamed."""

    content_type = JSON

    def __init__(self, asked: ResponseRequest, call: Call) -> None:
        self.snapshot = Snapshot(asked, call)
        self._output = Output(asked.id, None, custom=asked.custom_tools)

    def add(self, events: list[CallEvent], choice: int) -> None:
        for event in events:
            self._output.add(event)

    def parts(self) -> Iterator[bytes]:
        """Yield the `response` object as JSON, in parts."""
        return gathered(in_parts(self.response()))

    def response(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the response; `brief` as in `Output.objects`."""
        output = self._output
        if output.end is None:
            raise ValueError("the answer has no end")
        return self.snapshot.ended(output.objects(brief=brief), output.end, output.num_reasoning_tokens)

    def record(self, response: dict[str, Any]) -> NewRecord:
        asked = self.snapshot.asked
        return NewRecord(response=response, input=asked.to_keep, chain=asked.chain)
