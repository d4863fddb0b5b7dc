"""From a request to the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.chat.shared import SharedPrompts
from workers.chat.template import ChatTemplate
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Message, Tool


class Tokenizer(Protocol):
    """The model's vocabulary; safe to call from several threads."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]: ...


class Prompts:
    """Renders and tokenises. Safe to share: `tokens` may run on any thread, and holds no lock while it does."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        bos_text: str = "",
        num_tokens: int = 0,
        shared: Sequence[str] = (),
    ) -> None:
        """`num_tokens`: size of the vocabulary, which prompts that are tokens already are checked against.

        `shared`: system prompts that are everybody's.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._bos_text = bos_text
        self._num_tokens = num_tokens
        self._shared = SharedPrompts(shared, self._rendered)

    def tokens(self, request: GenerateRequest) -> Sequence[int]:
        """Raises CallFailed where the template refuses the messages, or a token of the prompt is none."""
        if isinstance(request.prompt, str):
            return self._tokenizer.tokenize(request.prompt, add_special=True, parse_special=True)
        if request.prompt is not None:
            return self._checked(request.prompt)
        return self._rendered(request.messages, request.tools)

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        """How many of the request's `tokens`, from the first, belong to everybody. As `tokens`, on any thread."""
        return self._shared.num_public(request, tokens)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Sequence[int]:
        text = self._template.render(messages, tools)
        has_bos = bool(self._bos_text) and text.startswith(self._bos_text)
        return self._tokenizer.tokenize(text, add_special=not has_bos, parse_special=True)

    def _checked(self, tokens: Sequence[int]) -> Sequence[int]:
        for position, token in enumerate(tokens):
            if not 0 <= token < self._num_tokens:
                message = (
                    f"`prompt` has token {token} at position {position}; this model's are 0 to {self._num_tokens - 1}"
                )
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "prompt"))
        return tokens
