"""Makes the tokens of a prompt in bounded time, and counts those of a system prompt that all teams share."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import repeat
from typing import Protocol, TypeVar, cast

from workers.chat.conversation import UNSET, Conversation, conversation_of
from workers.chat.infill import InfillPrompts
from workers.chat.media_places import SHOWN, cut, marked, new_marker, with_markers
from workers.llama.media.parts import MediaChunk
from workers.models.spec import ChatDefaults
from workers.protocol.events import RETRYABLE, CallFailed, Failure, FailureCode, context_overflow
from workers.protocol.pieces import INT32, RUN_TOKENS, extend, in_list
from workers.protocol.requests import GenerateRequest, Medium, Message, Role

TOKENISE_LEAST_S = 5.0
TOKENISE_S_PER_MIB = 4.0
"""Seconds that tokenising may take per 2**20 characters, beyond TOKENISE_LEAST_S. llama.cpp's slowest pre-tokenizers
take one second for this much ordinary text, and several seconds on a busy machine."""


def patience_s(num_chars: int) -> float:
    """Return the maximum number of seconds that tokenising a text of this many characters may take."""
    return TOKENISE_LEAST_S + TOKENISE_S_PER_MIB * num_chars / (1 << 20)


class Patience:
    """One time limit for several texts, tokenised one after the other. `num_chars`: characters of all of them."""

    def __init__(self, num_chars: int) -> None:
        self._num_chars = num_chars
        self._seconds = patience_s(num_chars)
        self._end = time.monotonic() + self._seconds

    def check(self) -> None:
        """Raise CallFailed once the time is up."""
        if time.monotonic() > self._end:
            raise too_slow(self._num_chars, self._seconds)


def too_slow(num_chars: int, seconds: float) -> CallFailed:
    """Return the error for a caller whose text takes too long to tokenise."""
    message = (
        f"a text of {num_chars} characters took longer than {seconds:.1f} s to tokenise; send a shorter one, or one "
        "with fewer like characters in a row"
    )
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, message))


Part = TypeVar("Part", int, int | str)

Tokenize = Callable[[Sequence[Message]], Sequence[int]]

OPENINGS = ("a", "Q", "7", " ", "\n\n", "\n", ".", "'s", "\u00e9", "\u4f60", "<", "{")
"""Beginnings of the user's message in the test conversations of `SharedPrompts`. They are as unlike as possible, so
that a last token before them that depends on what follows differs between the conversations: it is not shared."""


class SharedPrompts:
    """The system prompts of a model that the catalog lets all teams share. Safe to use from several threads.

    A conversation that begins with such a text, word for word, begins with tokens that depend only on the text and the
    model's template. These shared tokens are found once per text and day, as the common beginning of several test
    conversations that differ after the text. A prompt either begins with all of them, or nothing of it is shared. So
    whether they are cached reveals only that the text was in use, and nothing of what anybody wrote after it."""

    def __init__(self, texts: Iterable[str], tokenize: Tokenize, today: Callable[[], date] = date.today) -> None:
        """`texts`: the system prompts. `tokenize` returns the tokens of messages without tools, or raises CallFailed.

        `today` returns the local date, which templates may write into prompts."""
        self._texts = frozenset(texts)
        self._tokenize = tokenize
        self._today = today
        self._found: dict[tuple[str, str], tuple[date, Sequence[int]]] = {}

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        """Return how many of the prompt's first `tokens` come from a system prompt shared by all teams."""
        if request.prompt is not None or request.tools or not request.messages:
            return 0
        first = request.messages[0]
        if first.role not in ("system", "developer") or first.content not in self._texts:
            return 0
        public = self._public(first.role, first.content)
        return len(public) if list(tokens[: len(public)]) == list(public) else 0

    def _public(self, role: Role, text: str) -> Sequence[int]:
        """Return a system prompt's shared tokens. They are found anew each day, since templates may write the date."""
        today = self._today()
        known = self._found.get((role, text))
        if known is None or known[0] != today:
            try:
                known = self._found[role, text] = (today, self._common(role, text))
            except CallFailed as failed:
                if failed.failure.code not in RETRYABLE:  # a template without a place for system messages
                    self._found[role, text] = (today, ())
                return ()  # a process was lost, or memory is short: the next call looks again
        return known[1]

    def _common(self, role: Role, text: str) -> Sequence[int]:
        """Return the common beginning of the test conversations. Raises CallFailed."""
        first = Message(role, text)
        prompts = [self._tokenize([first, Message("user", f"{opening} {opening}")]) for opening in OPENINGS]
        shortest = min(prompts, key=len)
        for position, token in enumerate(shortest):
            if any(prompt[position] != token for prompt in prompts):
                return shortest[:position]
        return ()


SHORT_CHARS = 1024
"""Maximum number of characters of a text that is tokenised on the calling thread, which takes some milliseconds at
most; longer texts are tokenised on another thread."""

MAX_LIST = 1 << 20
"""Maximum number of a prompt's tokens that are kept in a list, with 40 bytes per token. Longer prompts, which fit no
context, stay in an array."""


class TooManyTokens(Exception):
    """A text has more tokens than are allowed."""

    def __init__(self, at_least: int, *, is_whole: bool = False) -> None:
        """`at_least`: the text has at least this many tokens. `is_whole`: they were counted to the end."""
        super().__init__(at_least)
        self.at_least = at_least
        self.is_whole = is_whole


class Tokenizer(Protocol):
    """The model's vocabulary; safe to call from several threads."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        """Return a text's tokens. May block for seconds. Raises CallFailed for a text that can't be tokenised,
        TooManyTokens for a long text of more than `most` tokens."""


class Templates(Protocol):
    """The model's chat templates; safe to call from several threads."""

    def render(self, conversation: Conversation) -> str:
        """Return the prompt's text. May block. Raises CallFailed."""


Seen = Sequence[Sequence[int] | MediaChunk]
"""What the model reads of one picture or sound: its cells, and the tokens around them."""


def length_of(seen: Seen) -> int:
    """Return the number of a medium's cells, and of the tokens around them."""
    return sum(len(part) if isinstance(part, Sequence) else part.num_cells for part in seen)


class MediaReader(Protocol):
    """Makes what the model reads of pictures and sounds; safe to call from several threads."""

    def read(self, medium: Medium) -> Seen:
        """Return a medium's cells, and the tokens around them. May block for seconds. Raises CallFailed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Sequence[int]
    """In place of a picture's or sound's cells, as many zeros."""
    text: str | None
    """The output of the template, up to where the assistant's turn begins; None: the prompt needs no template."""
    media: Sequence[tuple[int, MediaChunk]] = ()
    """Cells of pictures and sounds, each with the number of the first one among the tokens."""


class Prompts:
    """Renders and tokenises prompts, on any thread, without holding a lock."""

    def __init__(
        self,
        templates: Templates | None,
        tokenizer: Tokenizer,
        *,
        bos_text: str = "",
        end_token: int | None = None,
        num_tokens: int = 0,
        n_ctx: int = 0,
        shared: Sequence[str] = (),
        infill: InfillPrompts | None = None,
        defaults: ChatDefaults = UNSET,
        media: MediaReader | None = None,
    ) -> None:
        """`templates` None: the model does not chat. `end_token`: the token that `tokenizer` adds at the end of a text
        with special tokens; None: it adds none. `num_tokens`: size of the vocabulary, to check token ids in prompts.
        `n_ctx`: tokens of the longest single conversation; 0: no bound. `shared`: system prompts that all teams share.
        `infill` None: infill requests are refused. `defaults`: the catalog's values for templates. `media` None: the
        model reads text only."""
        self._templates = templates
        self._tokenizer = tokenizer
        self._bos_text = bos_text
        self._end_token = end_token
        self._num_tokens = num_tokens
        self._n_ctx = n_ctx
        self._infill = infill
        self._defaults = defaults
        self._media = media
        self._shared = SharedPrompts(shared, self._tokens_of)

    @property
    def can_infill(self) -> bool:
        """Whether infill requests can be answered."""
        return self._infill is not None and self._infill.are_possible

    def see(self, medium: Medium) -> Seen:
        """Return what the model reads of a picture or sound. May block for seconds. Raises CallFailed."""
        if self._media is None:
            message = "this model reads text only; send no pictures or sounds, or ask another model"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, medium.param or "messages"))
        return self._media.read(medium)

    def fitting(self, request: GenerateRequest, seen: Sequence[Seen] = ()) -> Prompt:
        """Return the prompt of a request that is to be answered. `seen`: what `see` returned for each of its media.

        Raises CallFailed as `prompt` does, and CallFailed (CONTEXT_OVERFLOW) as soon as it is clear that the prompt is
        too long."""
        try:
            return self._prompt(request, seen, self._n_ctx - 1 if self._n_ctx else None)
        except TooManyTokens as error:
            raise CallFailed(context_overflow(error.at_least, self._n_ctx, is_whole=error.is_whole)) from None

    def prediction(self, request: GenerateRequest) -> Sequence[int]:
        """Return the tokens of the text that the caller expects as the answer; empty if it names none, or a text that
        can't be tokenised in time: it would only have made the answer quicker."""
        text = request.speculation.prediction
        if not text or not request.speculation.enabled:
            return ()
        most = self._n_ctx or None
        try:
            return self._tokenizer.tokenize(text, add_special=False, parse_special=False, most=most)
        except (CallFailed, TooManyTokens):
            return ()

    def prompt(self, request: GenerateRequest, seen: Sequence[Seen] = ()) -> Prompt:
        """Return the prompt. `seen`: what `see` returned for each of the request's media.

        Raises CallFailed if the template refuses the messages, or a token is invalid."""
        return self._prompt(request, seen)

    def _prompt(self, request: GenerateRequest, seen: Sequence[Seen], most: int | None = None) -> Prompt:
        """Return the prompt. Raises CallFailed; TooManyTokens if the prompt has more than `most`."""
        if request.infill is not None:
            return Prompt(_listed(self._filled(request, most)), None)
        if seen:
            return self._with_media(request, seen, most)
        if request.prompt is not None:
            return Prompt(_listed(self.mixed(request.prompt, add_special=True, parse_special=True, most=most)), None)
        if not request.messages:
            message = "`messages` is empty; send at least one message"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages"))
        text = self.text(request)
        return Prompt(self._tokens_of_text(text, most), text)

    def text(self, request: GenerateRequest) -> str:
        """Return the request's messages as the template renders them. Raises CallFailed."""
        if request.media:
            marker = new_marker()
            return SHOWN.join(cut(self._marked_text(request, marker), marker, len(request.media)))
        return self._rendered(conversation_of(request, self._defaults))

    def _marked_text(self, request: GenerateRequest, marker: str) -> str:
        return self._rendered(conversation_of(marked(request, marker), self._defaults))

    def _with_media(self, request: GenerateRequest, seen: Sequence[Seen], most: int | None) -> Prompt:
        """Return a prompt with pictures or sounds. Raises CallFailed; TooManyTokens if it has more than `most`."""
        marker = new_marker()
        if isinstance(request.prompt, str):
            text = with_markers(request.prompt, request.prompt_media, marker)
        else:
            text = self._marked_text(request, marker)
        runs = cut(text, marker, len(seen))
        tokens: list[int] = []
        found: list[tuple[int, MediaChunk]] = []
        add_special = not (self._bos_text and text.startswith(self._bos_text))
        for number, run in enumerate(runs):
            if number:
                for part in seen[number - 1]:
                    if isinstance(part, Sequence):
                        tokens.extend(part)
                    else:
                        found.append((len(tokens), part))
                        tokens.extend(repeat(0, part.num_cells))
            left = None if most is None else max(0, most - len(tokens))
            add = add_special and not number
            try:
                tokens.extend(self._tokenizer.tokenize(run, add_special=add, parse_special=True, most=left))
            except TooManyTokens as error:
                is_whole = error.is_whole and number == len(runs) - 1
                raise TooManyTokens(len(tokens) + error.at_least, is_whole=is_whole) from None
            if add and tokens[-1:] == [self._end_token]:
                tokens.pop()  # it belongs at the end of the prompt
            if most is not None and len(tokens) > most:
                raise TooManyTokens(len(tokens))
        if add_special and self._end_token is not None:
            tokens.append(self._end_token)
        shown = None if request.prompt is not None else SHOWN.join(runs)
        return Prompt(tokens, shown, tuple(found))

    def _rendered(self, conversation: Conversation) -> str:
        """Return the rendered conversation. Raises CallFailed."""
        if self._templates is None:
            message = "this model is served for embeddings or ranking and renders no messages; send texts"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "messages"))
        return self._templates.render(conversation)

    def mixed(
        self, prompt: str | Sequence[int | str], *, add_special: bool, parse_special: bool, most: int | None = None
    ) -> Sequence[int]:
        """Return the tokens of a prompt: a text, a list of token ids, or a list of both.

        `add_special`: add special tokens to the prompt's first part, if that is a text. Raises CallFailed;
        TooManyTokens as soon as a text or a mixed list has more than `most` tokens."""
        if isinstance(prompt, str):
            return self._tokenizer.tokenize(prompt, add_special=add_special, parse_special=parse_special, most=most)
        if all(set(map(type, run)) == {int} for run in _runs(prompt)):
            return self._ids(cast("Sequence[int]", prompt))
        tokens = array(INT32)
        patience = Patience(num_chars(prompt))
        for position, part in enumerate(prompt):
            if isinstance(part, str):
                patience.check()
                add = add_special and position == 0
                try:
                    left = None if most is None else max(0, most - len(tokens))
                    more = self._tokenizer.tokenize(part, add_special=add, parse_special=parse_special, most=left)
                except TooManyTokens as error:
                    is_whole = error.is_whole and position == len(prompt) - 1
                    raise TooManyTokens(len(tokens) + error.at_least, is_whole=is_whole) from None
                extend(tokens, more)
                if most is not None and len(tokens) > most:
                    raise TooManyTokens(len(tokens))
            else:
                tokens.append(self._checked(part, position))
        return tokens

    def num_public(self, request: GenerateRequest, tokens: Sequence[int]) -> int:
        """Return how many of the prompt's first `tokens` come from a system prompt shared by all teams. Thread-safe."""
        return self._shared.num_public(request, tokens)

    def _tokens_of(self, messages: Sequence[Message]) -> Sequence[int]:
        return self._tokens_of_text(self.text(GenerateRequest(messages=tuple(messages))))

    def _tokens_of_text(self, text: str, most: int | None = None) -> Sequence[int]:
        has_bos = bool(self._bos_text) and text.startswith(self._bos_text)
        return _listed(self._tokenizer.tokenize(text, add_special=not has_bos, parse_special=True, most=most))

    def _filled(self, request: GenerateRequest, most: int | None) -> Sequence[int]:
        """Return an infill prompt. Raises CallFailed; TooManyTokens if the text being typed has more than `most`: all
        else is cut to fit."""
        if self._infill is None or request.infill is None:
            message = "this worker fills no gaps in code; ask a model that generates text"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "input_prefix"))

        infill = request.infill
        patience = Patience(text_chars(request))

        def tokenize(text: str) -> Sequence[int]:
            patience.check()
            return self._tokenizer.tokenize(text, add_special=False, parse_special=False)

        def parse(text: str) -> Sequence[int]:
            patience.check()
            return self._tokenizer.tokenize(text, add_special=False, parse_special=True, most=most)

        return self._infill.tokens(infill, tokenize, parse)

    def _ids(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return a prompt that is only token ids. They are checked run by run: checking 30,000 one by one takes 6 ms.

        Raises CallFailed."""
        tokens = array(INT32)
        for run in _runs(prompt):
            if min(run) < 0 or max(run) >= self._num_tokens:
                for position, token in enumerate(run, len(tokens)):
                    self._checked(token, position)
            tokens.extend(iter(run))
        return tokens

    def _checked(self, token: int, position: int) -> int:
        """Return the token. Raises CallFailed if the vocabulary has no token of this number."""
        if not 0 <= token < self._num_tokens:
            message = f"`prompt` has token {token} at position {position}; this model's are 0 to {self._num_tokens - 1}"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "prompt"))
        return token


def _listed(tokens: Sequence[int]) -> Sequence[int]:
    """Return a prompt's tokens as a list, which the engine handles fastest; more than MAX_LIST stay in an array."""
    return in_list(tokens) if len(tokens) <= MAX_LIST else tokens


def _runs(prompt: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Yield a prompt's parts, so many at a time that a call about them all is short; an empty prompt is one run."""
    for start in range(0, max(1, len(prompt)), RUN_TOKENS):
        yield prompt[start : start + RUN_TOKENS]


def is_quick(request: GenerateRequest) -> bool:
    """Return whether making the prompt is faster than switching to another thread; never true of chats and infill."""
    prompt = request.prompt
    if request.infill is not None or prompt is None or request.media or len(prompt) > SHORT_CHARS:
        return False
    if len(request.speculation.prediction) > SHORT_CHARS:
        return False
    return isinstance(prompt, str) or num_chars(prompt) <= SHORT_CHARS


def text_chars(request: GenerateRequest) -> int:
    """Return the number of characters that a request's prompt and prediction are made of, without token ids, and the
    bytes of its media: about its memory."""
    media = sum(len(one.data) for one in request.media)
    return len(request.speculation.prediction) + _prompt_chars(request) + media


def _prompt_chars(request: GenerateRequest) -> int:
    if request.prompt is not None:
        return len(request.prompt) if isinstance(request.prompt, str) else num_chars(request.prompt)
    if request.infill is not None:
        files = sum(len(file.text) for file in request.infill.files)
        return len(request.infill.prefix) + len(request.infill.suffix) + len(request.infill.prompt) + files
    schemas = sum(len(tool.parameters or "") + len(tool.description or "") for tool in request.tools)
    calls = sum(len(call.arguments) for message in request.messages for call in message.tool_calls)
    texts = sum(len(message.content or "") + len(message.reasoning or "") for message in request.messages)
    return texts + calls + schemas + len(request.template_values)


def num_chars(prompt: Sequence[int | str]) -> int:
    """Return the number of characters of the texts in a prompt."""
    return sum(len(part) for part in prompt if isinstance(part, str))
