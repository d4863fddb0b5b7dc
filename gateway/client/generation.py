"""Provides the methods that generate (chat, completion, infill; whole or streamed), and builds their requests.

`Client` and `AsyncClient` share these classes. The type parameters are what their `send` and `open` return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

import msgspec

import gateway.client.answers as answers
from gateway.client.answers import ChatChunk, ChatCompletion, CompletionChunk, CompletionResponse
from gateway.client.parameters import ChatParameters, CompletionParameters, Messages, Prompt
from gateway.client.request import Request, Send, Sender, StreamRequest, encode_body

Whole = TypeVar("Whole")
Many = TypeVar("Many")
Text = TypeVar("Text")
Streamed = TypeVar("Streamed")

Open = Callable[[StreamRequest[Any]], Any]


class ChatCompletions(Sender, Generic[Whole, Streamed]):
    def __init__(self, send: Send, open: Open) -> None:
        super().__init__(send)
        self._open = open

    @overload
    def create(
        self, messages: Messages, *, stream: Literal[False] = False, **parameters: Unpack[ChatParameters]
    ) -> Whole: ...

    @overload
    def create(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        resume_grace: int | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> Streamed: ...

    def create(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        resume_grace: int | None = None,
        **parameters: Unpack[ChatParameters],
    ) -> Whole | Streamed:
        """Generate the answer to a conversation.

        With `resume_grace` (1 to 60 seconds) a stream is resumed if its connection breaks.
        Raises ClientError; TypeError and ValueError for parameters that can't be sent."""
        if stream:
            streamed: Streamed = self._open(chat_stream(messages, resume_grace, parameters))
            return streamed
        whole: Whole = self._send(chat(messages, parameters))
        return whole


class Chat(Generic[Whole, Streamed]):
    def __init__(self, send: Send, open: Open) -> None:
        self.completions = ChatCompletions[Whole, Streamed](send, open)


class Completions(Sender, Generic[Whole, Many, Text, Streamed]):
    """The methods that generate with llama-server's own API."""

    def __init__(self, send: Send, open: Open) -> None:
        super().__init__(send)
        self._open = open

    @overload
    def complete(
        self, prompt: Prompt, *, stream: Literal[False] = False, **parameters: Unpack[CompletionParameters]
    ) -> Whole: ...

    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        resume_grace: int | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> Streamed: ...

    def complete(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        resume_grace: int | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> Whole | Streamed:
        """Continue a prompt. Raises ClientError; TypeError and ValueError for parameters that can't be sent."""
        return self._generated(COMPLETION, {"prompt": prompt}, stream, resume_grace, parameters)

    def complete_many(self, prompts: Sequence[Prompt], **parameters: Unpack[CompletionParameters]) -> Many:
        """Continue several prompts, or one prompt several times (`n_cmpl`). The answers' `index` counts from 0."""
        answers: Many = self._send(complete_many(prompts, parameters))
        return answers

    def simple_completion(self, prompt: Prompt, **parameters: Unpack[CompletionParameters]) -> Text:
        """Continue a prompt and return only the text."""
        text: Text = self._send(complete_text(prompt, parameters))
        return text

    @overload
    def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        input_extra: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
        stream: Literal[False] = False,
        **parameters: Unpack[CompletionParameters],
    ) -> Whole: ...

    @overload
    def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        input_extra: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
        stream: Literal[True],
        resume_grace: int | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> Streamed: ...

    def infill(
        self,
        input_prefix: str,
        input_suffix: str,
        *,
        input_extra: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
        stream: bool = False,
        resume_grace: int | None = None,
        **parameters: Unpack[CompletionParameters],
    ) -> Whole | Streamed:
        """Fill in code between a prefix and a suffix. `input_extra`: more files, each with `filename` and `text`."""
        gap = {"input_prefix": input_prefix, "input_suffix": input_suffix, "input_extra": input_extra, "prompt": prompt}
        return self._generated(INFILL, gap, stream, resume_grace, parameters)

    def _generated(
        self,
        path: str,
        values: Mapping[str, Any],
        stream: bool,
        resume_grace: int | None,
        parameters: CompletionParameters,
    ) -> Whole | Streamed:
        if stream:
            streamed: Streamed = self._open(complete_stream(path, values, resume_grace, parameters))
            return streamed
        whole: Whole = self._send(complete(path, values, parameters))
        return whole


T = TypeVar("T")

CHAT = "/v1/chat/completions"
COMPLETION = "/completion"
INFILL = "/infill"

_read_chat = msgspec.json.Decoder(ChatCompletion).decode
_read_chat_chunk = msgspec.json.Decoder(ChatChunk).decode


def chat(messages: Messages, parameters: ChatParameters) -> Request[ChatCompletion]:
    body = encode_body({"messages": messages, **_check_names(ChatParameters, parameters)})
    return Request("POST", CHAT, _read_chat, body=body)


def chat_stream(messages: Messages, resume_grace: int | None, parameters: ChatParameters) -> StreamRequest[ChatChunk]:
    body = encode_body({"messages": messages, "stream": True, **_check_names(ChatParameters, parameters)})
    return StreamRequest(CHAT, body, _read_chat_chunk, _never, resume_grace)


def complete(path: str, values: Mapping[str, Any], parameters: CompletionParameters) -> Request[CompletionResponse]:
    """Return the request for a completion, not streamed. `values`: the prompt, or an infill's prefix and suffix."""
    return _completion(path, values, parameters, answers.read_completion)


def complete_many(
    prompts: Sequence[Prompt], parameters: CompletionParameters
) -> Request[tuple[CompletionResponse, ...]]:
    return _completion(COMPLETION, {"prompt": prompts}, parameters, answers.read_completions)


def complete_text(prompt: Prompt, parameters: CompletionParameters) -> Request[str]:
    return _completion(COMPLETION, {"prompt": prompt}, parameters, answers.read_completion_text)


def complete_stream(
    path: str, values: Mapping[str, Any], resume_grace: int | None, parameters: CompletionParameters
) -> StreamRequest[CompletionChunk]:
    body = encode_body({**values, "stream": True, **_check_names(CompletionParameters, parameters)})
    return StreamRequest(path, body, answers.read_chunk, _stopped, resume_grace)


def _completion(
    path: str, values: Mapping[str, Any], parameters: CompletionParameters, read: Callable[[bytes], T]
) -> Request[T]:
    return Request("POST", path, read, body=encode_body({**values, **_check_names(CompletionParameters, parameters)}))


def _check_names(declared: type[Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters together with those in `extra_body`. Raises TypeError for a name that is not declared."""
    unknown = sorted(parameters.keys() - declared.__optional_keys__)
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}; what this client does not know goes into extra_body")
    return {**parameters, "extra_body": None, **(parameters.get("extra_body") or {})}


def _never(_: ChatChunk) -> bool:
    return False


def _stopped(chunk: CompletionChunk) -> bool:
    return chunk.stop
