"""From a request to the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.chat.template import ChatTemplate
from workers.protocol.requests import GenerateRequest


class Tokenizer(Protocol):
    """The model's vocabulary; safe to call from several threads."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]: ...


class Prompts:
    """Renders and tokenises. Stateless: `tokens` may run on any thread, and holds no lock while it does."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, bos_text: str = "") -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._bos_text = bos_text

    def tokens(self, request: GenerateRequest) -> Sequence[int]:
        """Raises CallFailed where the template refuses the messages."""
        text = self._template.render(request.messages, request.tools)
        has_bos = bool(self._bos_text) and text.startswith(self._bos_text)
        return self._tokenizer.tokenize(text, add_special=not has_bos, parse_special=True)
