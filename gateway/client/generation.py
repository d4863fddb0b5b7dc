"""The generating methods, declared once for both clients; type parameters stand for what `send` and `open` return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

import gateway.client.generation_calls as generation_calls
from gateway.client.ask import StreamAsk
from gateway.client.parameters import ChatParameters, CompletionParameters, Messages, Prompt
from gateway.client.sender import Send, Sender

Whole = TypeVar("Whole")
Many = TypeVar("Many")
Text = TypeVar("Text")
Streamed = TypeVar("Streamed")

Open = Callable[[StreamAsk[Any]], Any]


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
        """Answer a conversation. Raises ClientError; TypeError and ValueError for parameters that can't be sent.

        With `resume_grace` (1 to 60 seconds) a stream goes on after a broken connection.
        """
        if stream:
            streamed: Streamed = self._open(generation_calls.chat_stream(messages, resume_grace, parameters))
            return streamed
        whole: Whole = self._send(generation_calls.chat(messages, parameters))
        return whole


class Chat(Generic[Whole, Streamed]):
    def __init__(self, send: Send, open: Open) -> None:
        self.completions = ChatCompletions[Whole, Streamed](send, open)


class Completions(Sender, Generic[Whole, Many, Text, Streamed]):
    """The generating calls of llama-server's own API."""

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
        return self._generated(generation_calls.COMPLETION, {"prompt": prompt}, stream, resume_grace, parameters)

    def complete_many(self, prompts: Sequence[Prompt], **parameters: Unpack[CompletionParameters]) -> Many:
        """Continue several prompts, or each several times (`n_cmpl`); `index` is the number of each completion."""
        answers: Many = self._send(generation_calls.complete_many(prompts, parameters))
        return answers

    def simple_completion(self, prompt: Prompt, **parameters: Unpack[CompletionParameters]) -> Text:
        """Continue a prompt and return only the text."""
        text: Text = self._send(generation_calls.complete_text(prompt, parameters))
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
        return self._generated(generation_calls.INFILL, gap, stream, resume_grace, parameters)

    def _generated(
        self,
        path: str,
        values: Mapping[str, Any],
        stream: bool,
        resume_grace: int | None,
        parameters: CompletionParameters,
    ) -> Whole | Streamed:
        if stream:
            streamed: Streamed = self._open(generation_calls.complete_stream(path, values, resume_grace, parameters))
            return streamed
        whole: Whole = self._send(generation_calls.complete(path, values, parameters))
        return whole
