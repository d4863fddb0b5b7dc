"""The calls that generate, each as a value: chat, completion, infill; whole or streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

import gateway.client.completion_answers as completion_answers
from gateway.client.ask import Ask, StreamAsk, encoded
from gateway.client.chat_answers import ChatChunk, ChatCompletion
from gateway.client.completion_answers import CompletionChunk, CompletionResponse
from gateway.client.parameters import ChatParameters, CompletionParameters, Messages, Prompt

T = TypeVar("T")

CHAT = "/v1/chat/completions"
COMPLETION = "/completion"
INFILL = "/infill"

_read_chat = msgspec.json.Decoder(ChatCompletion).decode
_read_chat_chunk = msgspec.json.Decoder(ChatChunk).decode


def chat(messages: Messages, parameters: ChatParameters) -> Ask[ChatCompletion]:
    body = encoded({"messages": messages, **_checked(ChatParameters, parameters)})
    return Ask("POST", CHAT, _read_chat, body=body)


def chat_stream(messages: Messages, resume_grace: int | None, parameters: ChatParameters) -> StreamAsk[ChatChunk]:
    body = encoded({"messages": messages, "stream": True, **_checked(ChatParameters, parameters)})
    return StreamAsk(CHAT, body, _read_chat_chunk, _never, resume_grace)


def complete(path: str, values: Mapping[str, Any], parameters: CompletionParameters) -> Ask[CompletionResponse]:
    """Return the call for a whole completion. `values`: the prompt, or the prefix and suffix of an infill."""
    return _completion(path, values, parameters, completion_answers.read_completion)


def complete_many(prompts: Sequence[Prompt], parameters: CompletionParameters) -> Ask[tuple[CompletionResponse, ...]]:
    return _completion(COMPLETION, {"prompt": prompts}, parameters, completion_answers.read_completions)


def complete_text(prompt: Prompt, parameters: CompletionParameters) -> Ask[str]:
    return _completion(COMPLETION, {"prompt": prompt}, parameters, completion_answers.read_completion_text)


def complete_stream(
    path: str, values: Mapping[str, Any], resume_grace: int | None, parameters: CompletionParameters
) -> StreamAsk[CompletionChunk]:
    body = encoded({**values, "stream": True, **_checked(CompletionParameters, parameters)})
    return StreamAsk(path, body, completion_answers.read_chunk, _stopped, resume_grace)


def _completion(
    path: str, values: Mapping[str, Any], parameters: CompletionParameters, read: Callable[[bytes], T]
) -> Ask[T]:
    return Ask("POST", path, read, body=encoded({**values, **_checked(CompletionParameters, parameters)}))


def _checked(declared: type[Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters together with those in `extra_body`. Raises TypeError for a name that is not declared."""
    unknown = sorted(parameters.keys() - declared.__optional_keys__)
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}; what this client does not know goes into extra_body")
    return {**parameters, "extra_body": None, **(parameters.get("extra_body") or {})}


def _never(_: ChatChunk) -> bool:
    return False


def _stopped(chunk: CompletionChunk) -> bool:
    return chunk.stop
