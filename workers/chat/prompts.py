"""From a request to the tokens of its prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.chat.conversation import Conversation, conversation_of
from workers.chat.infill import InfillPrompts
from workers.chat.shared import SharedPrompts
from workers.patience import Patience
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Message

SHORT_CHARS = 1024
"""Up to this long, texts are tokenised at once, on whichever thread: any of them takes some milliseconds at most."""

MAX_LIST = 1 << 20
"""More tokens than any context takes stay in an array: as numbers of Python's, each would take 40 bytes."""


class Tokenizer(Protocol):
    """The model's vocabulary; safe to call from several threads."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]:
        """May block for seconds. Raises CallFailed for a text that can't be tokenised."""


class Templates(Protocol):
    """The model's chat templates; safe to call from several threads."""

    def render(self, conversation: Conversation) -> str:
        """The prompt's text. May block. Raises CallFailed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Sequence[int]
    text: str | None
    """What a template made, up to where the assistant speaks; None where no template was needed."""


class Prompts:
    """Renders and tokenises. Safe to share: it may run on any thread, and holds no lock while it does."""

    def __init__(
        self,
        templates: Templates | None,
        tokenizer: Tokenizer,
        *,
        bos_text: str = "",
        num_tokens: int = 0,
        shared: Sequence[str] = (),
        infill: InfillPrompts | None = None,
    ) -> None:
        """`templates` None: for a model that does not chat. `num_tokens`: size of the vocabulary, which prompts that
        are tokens already are checked against. `shared`: system prompts that are everybody's. `infill` None: no request
        of that kind gets here.
        """
        self._templates = templates
        self._tokenizer = tokenizer
        self._bos_text = bos_text
        self._num_tokens = num_tokens
        self._infill = infill
        self._shared = SharedPrompts(shared, self._tokens_of)

    def tokens(self, request: GenerateRequest) -> Sequence[int]:
        """As `prompt`."""
        return self.prompt(request).tokens

    def prompt(self, request: GenerateRequest) -> Prompt:
        """Raises CallFailed where the template refuses the messages, or a token of the prompt is none."""
        if request.infill is not None:
            return Prompt(self._filled(request), None)
        if request.prompt is not None:
            return Prompt(self.mixed(request.prompt, add_special=True, parse_special=True), None)
        if not request.messages:
            message = "`messages` is empty; send at least one message"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages"))
        text = self.text(conversation_of(request))
        return Prompt(self._tokens_of_text(text), text)

    def text(self, conversation: Conversation) -> str:
        """What the template makes of it. Raises CallFailed."""
        if self._templates is None:
            message = "this model is served for embeddings or ranking and has no chat; ask another one"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "messages"))
        return self._templates.render(conversation)

    def mixed(self, prompt: str | Sequence[int | str], *, add_special: bool, parse_special: bool) -> Sequence[int]:
        """Text, tokens, or both in turn. `add_special` is for a text at the beginning. Raises CallFailed."""
        if isinstance(prompt, str):
            return self._tokenizer.tokenize(prompt, add_special=add_special, parse_special=parse_special)
        tokens = array("q")
        patience = Patience(num_chars(prompt))
        for position, part in enumerate(prompt):
            if isinstance(part, str):
                patience.check()
                add = add_special and position == 0
                tokens.extend(self._tokenizer.tokenize(part, add_special=add, parse_special=parse_special))
            else:
                tokens.append(self._checked(part, position))
        return tokens.tolist() if len(tokens) <= MAX_LIST else tokens

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        """How many of the request's `tokens`, from the first, belong to everybody. As `tokens`, on any thread."""
        return self._shared.num_public(request, tokens)

    def _tokens_of(self, messages: Sequence[Message]) -> Sequence[int]:
        return self._tokens_of_text(self.text(Conversation(messages=tuple(messages))))

    def _tokens_of_text(self, text: str) -> Sequence[int]:
        has_bos = bool(self._bos_text) and text.startswith(self._bos_text)
        return self._tokenizer.tokenize(text, add_special=not has_bos, parse_special=True)

    def _filled(self, request: GenerateRequest) -> Sequence[int]:
        if self._infill is None or request.infill is None:
            message = "this worker fills no gaps in code; ask a model that generates text"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "input_prefix"))

        infill = request.infill
        patience = Patience(len(infill.prefix) + len(infill.suffix) + sum(len(file.text) for file in infill.files))

        def tokenize(text: str, *, parse_special: bool = False) -> list[int]:
            patience.check()
            return list(self._tokenizer.tokenize(text, add_special=False, parse_special=parse_special))

        return self._infill.tokens(infill, tokenize, lambda text: tokenize(text, parse_special=True))

    def _checked(self, token: int, position: int) -> int:
        """Raises CallFailed."""
        if not 0 <= token < self._num_tokens:
            message = f"`prompt` has token {token} at position {position}; this model's are 0 to {self._num_tokens - 1}"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "prompt"))
        return token


def is_quick(request: GenerateRequest) -> bool:
    """Whether its prompt takes less time than a hop to another thread; nothing that is rendered does."""
    prompt = request.prompt
    if request.infill is not None or prompt is None or len(prompt) > SHORT_CHARS:
        return False
    return isinstance(prompt, str) or num_chars(prompt) <= SHORT_CHARS


def num_chars(prompt: Sequence[int | str]) -> int:
    """Return the length of the texts in it."""
    return sum(len(part) for part in prompt if isinstance(part, str))
