"""Reads `POST /completion`, `POST /completions` and `POST /infill`, and writes completions, whole or streamed.

Source of the events' form: `server_task_result_cmpl_partial` in tools/server/server-task.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.types import Scope

from gateway.api.http.answers import JSON, EncodedArray, gathered, in_parts
from gateway.api.http.streaming import data
from gateway.api.native.answer import Answer, FleetInfo, entry
from gateway.api.native.error_shape import error_object
from gateway.api.native.request import CompletionRequest, read_completion, read_infill
from gateway.api.shapes import progress_object, progress_timings, stop_type, timings_object
from gateway.call import Call
from gateway.errors import PaddockError
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import (
    CallEvent,
    Finished,
    Logprobs,
    Progress,
    Settings,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
)

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the events of a streamed request; several answers' events come mixed. No event marks the stream's end."""

    def __init__(self, asked: CompletionRequest, call: Call, request_log: RequestLog, fleet: FleetInfo) -> None:
        self._answers = [
            _Stream(Answer(number, asked, call, request_log, fleet)) for number in range(len(asked.requests))
        ]

    def opening(self) -> bytes:
        return b""

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        one = self._answers[choice].one
        if len(events) == 1:
            return one(events[0])
        return b"".join([one(event) for event in events])

    def closing(self) -> bytes:
        return b""

    def idle(self) -> bytes:
        return self._answers[0].idle()

    def broken(self, error: PaddockError) -> bytes:
        return data(_encode({"error": error_object(error)}))


class _Stream:
    """Writes the events of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._head = b'data: {"index":%d,"content":' % answer.number
        self._tail = b',"tokens_evaluated":0,"stop":false,"id_slot":-1'
        self._num_tokens = 0
        self._tokens: list[int] = []
        self._extra: dict[str, Any] = {}
        """Fields that the next event has in addition to its text."""

    def one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                return self._text(event)
            case Tokens():
                self._tokens += event.tokens
            case Logprobs():
                told = entry(event, post_sampling=self._answer.request.post_sampling_probs)
                self._extra.setdefault("completion_probabilities", []).append(told)
            case TimingsSoFar():
                self._extra["timings"] = timings_object(event.timings)
            case Progress():
                return self._progress(event)
            case Started() | Settings():
                self._answer.note(event)
                self._tail = b',"tokens_evaluated":%d' % self._answer.num_prompt_tokens
                self._tail += b',"stop":false,"id_slot":%d' % self._answer.slot
            case Finished():
                return data(_encode(self._answer.final(event, "", (), None)))
            case _:
                pass
        return b""

    def idle(self) -> bytes:
        """Return an event with no new text or tokens, to keep the stream alive."""
        return self._event("", [], b"")

    def _text(self, event: Text) -> bytes:
        self._num_tokens += event.num_tokens
        text = event.text
        if "\n" in text:
            self._answer.has_new_line = True
        return self._chunk(text)

    def _progress(self, event: Progress) -> bytes:
        self._extra["prompt_progress"] = progress_object(event)
        if "timings" in self._answer.request.tell:
            self._extra["timings"] = progress_timings(event)
        return self._chunk("")

    def _chunk(self, text: str) -> bytes:
        tokens, self._tokens = self._tokens, []
        extra = b""
        if self._extra:
            extra = b"," + _encode(self._extra)[1:-1]
            self._extra = {}
        return self._event(text, tokens, extra)

    def _event(self, text: str, tokens: list[int], extra: bytes) -> bytes:
        # `%d` writes integers as JSON does.
        return b'%b%b,"tokens":%b,"tokens_predicted":%d%b%b}\n\n' % (
            self._head,
            _encode(text),
            _encode(tokens),
            self._num_tokens,
            self._tail,
            extra,
        )


class WholeWriter:
    content_type = JSON

    def __init__(self, asked: CompletionRequest, call: Call, request_log: RequestLog, fleet: FleetInfo) -> None:
        def make(number: int) -> _Whole:
            return _Whole(Answer(number, asked, call, request_log, fleet))

        self._make = make
        self._is_single = len(asked.requests) == 1
        self._answers: dict[int, _Whole] = {}
        """Number of an answer -> its collector, for answers that have begun."""

    def add(self, events: list[CallEvent], choice: int) -> None:
        answer = self._answers.get(choice)
        if answer is None:
            answer = self._answers[choice] = self._make(choice)
        for event in events:
            answer.add(event)

    def parts(self) -> Iterator[bytes]:
        """Yield JSON in parts, since answers can have long settings: an object for one answer, an array for several."""
        if self._is_single:
            return in_parts(self._answers[0].object())
        return gathered(self._array())

    def _array(self) -> Iterator[bytes]:
        for number in sorted(self._answers):
            yield b"," if number else b"["
            yield from in_parts(self._answers[number].object())
        yield b"]"


class _Whole:
    """Collects one answer from its events."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._probabilities: list[bytes] = []
        """Probabilities, encoded as they come: encoding all at the end (up to 100 per token) blocked other streams."""
        self._num_in_text = 0
        """Number of probabilities whose tokens have become text."""
        self._end: Finished | None = None

    def add(self, event: CallEvent) -> None:
        match event:
            case Text():
                self._texts.append(event.text)
                self._num_in_text = len(self._probabilities)
            case Tokens():
                self._tokens += event.tokens
            case Logprobs():
                post_sampling = self._answer.request.post_sampling_probs
                self._probabilities.append(_encode(entry(event, post_sampling=post_sampling)))
            case Started() | Settings():
                self._answer.note(event)
            case Finished():
                self._end = event

    def object(self) -> dict[str, Any]:
        end = self._end
        if end is None:
            raise ValueError("the answer has no end")
        text = "".join(self._texts)
        self._answer.has_new_line = "\n" in text
        told = self._probabilities if self._answer.request.n_probs else None
        if told is not None and stop_type(end) == "word":
            told = told[: self._num_in_text]  # without those of the stop string's tokens
        return self._answer.final(end, text, self._tokens, None if told is None else EncodedArray(told))


class CompletionDialect:
    """Reads and writes llama-server's completions: of `/completion` or, with `infill`, of `/infill`."""

    def __init__(self, fleet: FleetInfo, *, infill: bool = False) -> None:
        self._fleet = fleet
        self._read: Callable[[bytes, Scope], CompletionRequest] = read_infill if infill else read_completion

    def read(self, raw: bytes, scope: Scope) -> CompletionRequest:
        return self._read(raw, scope)

    def stream_writer(self, asked: CompletionRequest, call: Call, request_log: RequestLog) -> ChunkWriter:
        return ChunkWriter(asked, call, request_log, self._fleet)

    def whole_writer(self, asked: CompletionRequest, call: Call, request_log: RequestLog) -> WholeWriter:
        return WholeWriter(asked, call, request_log, self._fleet)
