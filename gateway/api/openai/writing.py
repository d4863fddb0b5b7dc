"""Writes what chats and completions, streamed or whole, have in common (ids, heads, usage, `__verbose`), and errors.

Sources: OpenAI's API reference, "Error"; for `__verbose`, `to_json_oaicompat_chat` and `to_json_non_oaicompat` in
tools/server/server-task.cpp of llama.cpp. Routes that belong to no dialect answer errors in OpenAI's form, too.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.dialect import ErrorShape, Handler
from gateway.api.http.answers import in_parts
from gateway.api.http.streaming import DONE, data
from gateway.api.openai.bodies import StreamUsageOptions
from gateway.api.shapes import settings_object, stop_type, timings_object, usage_object
from gateway.call import Principal
from gateway.dispatch.fan_out import usage_of
from gateway.errors import ContextOverflow, NotSupported, PaddockError
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import CallEvent, Finished, Settings, Started, Text, TimingsSoFar, Tokens, Usage
from workers.protocol.requests import GenerateRequest


class StreamUsage:
    """Counts a stream's tokens. While an answer runs, its events are added up; its last event has the exact number."""

    def __init__(
        self, options: StreamUsageOptions, num_answers: int, num_prompts: int, *, is_foretold: bool = False
    ) -> None:
        """`is_foretold`: whether the caller sent a prediction of the answer."""
        self._is_foretold = is_foretold
        self.always = options.always
        self.at_end = options.at_end
        self._per_prompt = num_answers // num_prompts
        self._starts: dict[int, Started] = {}
        """Number of a prompt -> start of the first answer to it, since a prompt counts once for all its answers."""
        self._generated = [0] * num_answers
        self._thought = [0] * num_answers
        self.ends: list[Finished | None] = [None] * num_answers

    def started(self, number: int, event: Started) -> None:
        self._starts.setdefault(number // self._per_prompt, event)

    def generated(self, number: int, num_tokens: int) -> None:
        self._generated[number] += num_tokens

    def thought(self, number: int, num_tokens: int) -> None:
        self._thought[number] += num_tokens

    def ended(self, number: int, event: Finished) -> None:
        self.ends[number] = event
        self._generated[number] = event.usage.completion_tokens

    def so_far(self) -> dict[str, Any]:
        prompts = (start.usage for start in self._starts.values())
        usage = sum(prompts, start=Usage(0, sum(self._generated), 0))
        return usage_object(usage, sum(self._thought))

    def whole(self) -> dict[str, Any]:
        """Return the usage of the whole request. Call it when every answer has ended."""
        ends = [end for end in self.ends if end is not None]
        usage = usage_of(ends, len(ends) // self._per_prompt)
        return usage_object(usage, sum(self._thought), is_foretold=self._is_foretold)


def chat_id() -> str:
    return "chatcmpl-" + os.urandom(12).hex()


def completion_id() -> str:
    return "cmpl-" + os.urandom(12).hex()


class Choice(Protocol):
    """Collects one answer from its events."""

    @property
    def end(self) -> Finished | None: ...
    def add(self, event: CallEvent) -> None: ...
    def object(self, number: int, end: Finished) -> dict[str, Any]: ...
    def verbose(self, end: Finished) -> dict[str, Any]: ...


ChoiceT = TypeVar("ChoiceT", bound=Choice)


class WholeChoices(Generic[ChoiceT]):
    """Collects all answers to one request from the events, each in a collector (`Choice`) of its own."""

    def __init__(self, make: Callable[[int], ChoiceT], number: int) -> None:
        """`number`: answers in all. `make(i)` makes the collector of answer `i` when it begins: 100 may be waiting."""
        self._make = make
        self._number = number
        self._made: dict[int, ChoiceT] = {}

    @property
    def choices(self) -> list[ChoiceT]:
        """Return the collectors of the answers that have begun, in the answers' order."""
        return [self._made[number] for number in sorted(self._made)]

    def add(self, events: list[CallEvent], choice: int) -> None:
        collected = self._made.get(choice)
        if collected is None:
            collected = self._made[choice] = self._make(choice)
        for event in events:
            collected.add(event)

    @property
    def ends(self) -> list[Finished]:
        ends = [choice.end for choice in self.choices if choice.end is not None]
        if len(ends) < self._number:
            raise ValueError("an answer has no end")
        return ends

    def written(self, id_: str, kind: str, model: str, usage: dict[str, Any], fingerprint: str) -> Iterator[bytes]:
        """Yield the response's JSON in parts. If there are several answers, each also has `timings` of its own.

        `kind`: value of `object`. `fingerprint`: value of `system_fingerprint`; if it is empty, the field is left out.
        """
        ends = self.ends
        choices = [
            choice.object(number, end) for number, (choice, end) in enumerate(zip(self.choices, ends, strict=True))
        ]
        if len(ends) > 1:
            for choice, end in zip(choices, ends, strict=True):
                choice["timings"] = timings_object(end.timings)
        document = {
            "id": id_,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": usage,
            "timings": timings_object(ends[0].timings),
        }
        document |= self.choices[0].verbose(ends[0])
        return in_parts(document | ({"system_fingerprint": fingerprint} if fingerprint else {}))


class Verbose:
    """Writes llama-server's `__verbose`: the prompt as the model read it, and the settings that the answer had.

    The answer's text is not repeated there."""

    def __init__(self, request: GenerateRequest, *, wanted: bool, stream: bool) -> None:
        self._request = request
        self._wanted = wanted
        self._stream = stream
        self._ran: Settings | None = None

    def note(self, event: Settings) -> None:
        self._ran = event

    def fields(self, end: Finished) -> dict[str, Any]:
        """Return the field `__verbose` of the answer; an empty dict if the caller did not ask for it."""
        if not self._wanted:
            return {}
        ran, usage = self._ran, end.usage
        sampling = self._request.sampling if ran is None else ran.sampling
        return {
            "__verbose": {
                "prompt": "" if ran is None else ran.prompt,
                "generation_settings": settings_object(
                    self._request, sampling, self._request.adapters, stream=self._stream
                ),
                "tokens_predicted": usage.completion_tokens,
                "tokens_evaluated": usage.prompt_tokens,
                "truncated": end.truncated,
                "stop_type": stop_type(end),
                "stopping_word": end.stop or "",
                "timings": timings_object(end.timings),
            }
        }


_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes choices as chunks, each of them one server-sent event."""

    def __init__(self, id_: str, kind: str, model: str, usage: StreamUsage) -> None:
        """`kind`: value of the field `object` in the chunks."""
        head = _encode({"id": id_, "object": kind, "created": int(time.time()), "model": model})
        self._start = self._head = b"data: " + head[:-1]
        self._usage = usage
        # If the stream ends with a chunk of usage, all other chunks have the field `usage` with null.
        self._tail = b',"usage":null}\n\n' if usage.at_end else b"}\n\n"

    def sign(self, fingerprint: str) -> None:
        """Add `fingerprint` to all later chunks as `system_fingerprint`; if it is empty, add nothing."""
        self._head = self._start + b',"system_fingerprint":' + _encode(fingerprint) if fingerprint else self._start

    def framed(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a plain chunk.

        The chunk has one choice, whose JSON is `before` + text + `after`."""
        return self._head + b',"choices":[' + before, after + b"]" + self._tail

    def chunk(self, choice: dict[str, Any], extra: bytes = b"") -> bytes:
        body = self._head + b',"choices":[' + _encode(choice) + b"]" + extra
        if self._usage.always:
            return body + b',"usage":' + _encode(self._usage.so_far()) + b"}\n\n"
        return body + self._tail

    def end(self, number: int, event: Finished, verbose: Verbose) -> bytes:
        """Note the end of an answer; return the JSON of the fields that follow the choice in its last chunk.

        The answer's `timings` are among these fields. But a single answer has them in its usage chunk, if one follows.
        """
        usage = self._usage
        usage.ended(number, event)
        told = verbose.fields(event)
        if not usage.at_end or len(usage.ends) > 1:
            told = {"timings": timings_object(event.timings), **told}
        return b"," + _encode(told)[1:-1] if told else b""

    def last(self) -> bytes:
        """Return the chunk of usage; empty if the caller did not ask for it."""
        usage = self._usage
        if not usage.at_end:
            return b""
        body = self._head + b',"choices":[],"usage":' + _encode(usage.whole())
        [end, *more] = usage.ends
        if end is not None and not more:
            body += b',"timings":' + _encode(timings_object(end.timings))
        return body + b"}\n\n"


class ChoiceWriter(ABC):
    """Writes one answer's chunks. It must not refer to its `ChunkWriter`: only the collector would free the cycle."""

    def __init__(
        self, head: ChunkEncoder, usage: StreamUsage, number: int, request: GenerateRequest, verbose: Verbose
    ) -> None:
        self._head = head
        self._verbose = verbose
        self._usage = usage
        self._number = number
        self._tells_timings = "timings" in request.tell
        self._tokens: list[int] = []
        self._timings: TimingsSoFar | None = None
        self._counts = usage.always
        self._plain = not self._counts
        """Whether the next text makes a plain chunk, which has no usage, probabilities, tokens or timings."""

    @abstractmethod
    def frame(self) -> None:
        """Encode what frequent chunks have in common. Call this again after `ChunkEncoder.sign` has added a field."""

    @abstractmethod
    def opening(self) -> bytes:
        """Return the chunk to send before any event comes; empty if there is none."""

    @abstractmethod
    def text(self, event: Text) -> bytes:
        """Return the chunk of a text."""

    @abstractmethod
    def one(self, event: CallEvent) -> bytes:
        """Return the chunk for an event of any type; empty if the client gets nothing of it."""

    def _keep(self, event: Tokens | TimingsSoFar) -> None:
        """Keep the event for the chunk of the text that follows it."""
        self._plain = False
        if isinstance(event, Tokens):
            self._tokens += event.tokens
        else:
            self._timings = event

    def _complete(self, choice: dict[str, Any], extra: bytes) -> bytes:
        """Return a chunk of the choice with what is kept for it. `extra`: more fields of the chunk, as JSON."""
        if self._tokens:
            choice["tokens"], self._tokens = self._tokens, []
        if self._timings is not None and choice["finish_reason"] is None:
            extra += b',"timings":' + _encode(timings_object(self._timings.timings))
            self._timings = None
        self._plain = not self._counts
        return self._head.chunk(choice, extra)


class ChunkWriter:
    """Writes the chunks of all answers to one streamed request. What all chunks share is encoded once."""

    def __init__(
        self, head: ChunkEncoder, choices: Sequence[ChoiceWriter], idle: dict[str, Any], request_log: RequestLog
    ) -> None:
        """`idle`: the choice of a chunk that says nothing, sent to keep a connection open."""
        self._head = head
        self._choices = choices
        self._idle = idle
        self._request_log = request_log

    def opening(self) -> bytes:
        self._head.sign(self._request_log.fingerprint)
        for choice in self._choices:
            choice.frame()
        return b"".join([choice.opening() for choice in self._choices])

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        """Return the chunks for `events` as one piece of bytes; empty if the client gets nothing of them."""
        writer = self._choices[choice]
        if len(events) == 1:
            event = events[0]
            if type(event) is Text:
                return writer.text(event)
        return b"".join([writer.one(event) for event in events])

    def closing(self) -> bytes:
        return self._head.last() + DONE

    def idle(self) -> bytes:
        return self._head.chunk(self._idle)

    def broken(self, error: PaddockError) -> bytes:
        return data(error_body(error)) + DONE


class OpenAiErrors:
    def __init__(self, prompt: str = "messages") -> None:
        """`prompt`: this route's parameter for the model's input. Errors of workers call that parameter `messages`."""
        self._names = {"messages": prompt}

    def status(self, error: PaddockError) -> int:
        return error.status

    def body(self, error: PaddockError, request_log: RequestLog) -> bytes:
        return error_body(error, self._names)


OPENAI: ErrorShape = OpenAiErrors()
COMPLETIONS: ErrorShape = OpenAiErrors("prompt")
RESPONSES: ErrorShape = OpenAiErrors("input")
TRANSCRIPTIONS: ErrorShape = OpenAiErrors("file")


def error_body(error: PaddockError, names: Mapping[str, str] | None = None) -> bytes:
    """Return `{"error": {...}}`. `names`: a worker's name for a parameter -> the route's name.

    If a prompt is too long, the error has `n_prompt_tokens` and `n_ctx`, which the web page of llama-server shows."""
    param = (names or {}).get(error.param or "", error.param)
    inner: dict[str, Any] = {"message": error.message, "type": error.type, "param": param, "code": error.code}
    if isinstance(error, ContextOverflow) and error.n_ctx:
        inner |= {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.n_ctx}
    return _encode({"error": inner})


REASONS: Mapping[str, str] = {
    "moderations": "Paddock has no model that moderates texts. Ask a chat model to judge them, with a "
    "`response_format` for its verdict.",
    "conversations": "Paddock keeps no conversations by an id of their own. Continue a stored response by "
    "`previous_response_id`, or send the whole conversation as `input`.",
    "compact": "Paddock shortens no conversations. Send `truncation: auto`, which leaves out the oldest turns, or have "
    "a model sum them up and go on from that.",
    "streams": "Paddock knows a stream by an id of its own, not by a conversation. Ask with the header "
    "`x-resume-grace`, and go on from the last event with `last-event-id`.",
    "control": "Paddock ends no thought that is under way. Send its bound with the request: `reasoning_budget_tokens`.",
    "agent_tools": "Paddock runs no tools. Send yours as `tools` of a chat, run what the model calls, and send what "
    "came of it.",
}
"""Name of a handler -> message for its callers; one for each route that is not served."""


def unserved_handlers() -> dict[str, Handler]:
    """Return the handlers of routes that are not served, by their names in `gateway.api.routes`."""
    return {name: partial(_refuse, reason) for name, reason in REASONS.items()}


async def _refuse(reason: str, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    raise NotSupported(reason)
