"""Writes llama-server's completions as one object, or as an array of them where several were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.api.answers import EncodedArray, gathered, in_parts
from gateway.api.generation_settings import stop_type
from gateway.api.native.answer import Answer, Place
from gateway.api.native.completion_request import CompletionRequest
from gateway.api.native.probabilities import entry
from gateway.call import Call
from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Finished, Logprobs, Settings, Started, Text, Tokens

_encode = msgspec.json.Encoder().encode


class WholeWriter:
    def __init__(self, asked: CompletionRequest, call: Call, trail: Trail, place: Place) -> None:
        self._answers = [_Whole(Answer(number, asked, call, trail, place)) for number in range(len(asked.requests))]

    def add(self, events: list[CallEvent], choice: int) -> None:
        answer = self._answers[choice]
        for event in events:
            answer.add(event)

    def parts(self) -> Iterator[bytes]:
        """Yield the object or the array as JSON, some answers at a time: each has its settings, which may be long."""
        if len(self._answers) == 1:
            return in_parts(self._answers[0].object())
        return gathered(self._array())

    def _array(self) -> Iterator[bytes]:
        for number, answer in enumerate(self._answers):
            yield b"," if number else b"["
            yield from in_parts(answer.object())
        yield b"]"


class _Whole:
    """Collects one of the answers."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._probabilities: list[bytes] = []
        """Encoded as they come: a hundred of them for each token, all encoded at the end, held up other streams."""
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
            told = told[: self._num_in_text]  # not those of the stop string
        return self._answer.final(end, text, self._tokens, None if told is None else EncodedArray(told))
