"""Makes the tokens of an infill prompt, by which a model writes the code between a prefix and a suffix.

Sources: `format_prompt_infill` in tools/server/server-common.cpp of llama.cpp (order of the tokens, bounds and
separating texts); https://arxiv.org/abs/2409.12186 (pattern for whole repositories).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.pieces import joined
from workers.protocol.requests import Infill

SNIPPET = "\n\n--- snippet ---\n\n"
REPOSITORY, FILE = "myproject\n", "filename\n"

CHARACTERS_PER_TOKEN = 8
"""Characters cut from a text for each token wanted. Tokens are shorter on average, so the first cut is large enough."""

MARGIN = 1024
"""Number of tokens to read beyond those needed: where a text is cut within a word, the tokens at the cut are wrong."""

Tokenize = Callable[[str], Sequence[int]]
"""A function that tokenises a text and takes control tokens in the text for plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTokens:
    """A model's fill-in-the-middle tokens; None: the model lacks the token."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    begin: int | None = None
    """The token with which every text begins; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRoom:
    """The bounds of an infill prompt in tokens, and whether the model wants the suffix first (`spm_infill`)."""

    n_ctx: int
    n_batch: int
    suffix_first: bool = False

    @property
    def near(self) -> int:
        """Maximum tokens of prefix, suffix and prompt together. A quarter of a small context is left for the answer."""
        return min(self.n_batch, self.n_ctx * 3 // 4)

    @property
    def extra(self) -> int:
        """Maximum number of tokens for other files."""
        return max(0, self.n_ctx - self.n_batch + 2)


class InfillPrompts:
    """Makes infill prompts; stateless. `tokens` None: the model can't infill, and every request is refused."""

    def __init__(self, tokens: InfillTokens | None, room: InfillRoom) -> None:
        self._tokens = tokens
        self._room = room

    @property
    def are_possible(self) -> bool:
        """Whether the model has the tokens that infill needs."""
        return self._tokens is not None

    def tokens(self, infill: Infill, tokenize: Tokenize, parse: Tokenize) -> array[int]:
        """Return the prompt's tokens. `parse`: like `tokenize`, but control tokens written out in the text become
        tokens; it reads `infill.prompt`, of which nothing is cut.

        The end of the prefix gets three quarters of `InfillRoom.near`. The start of the suffix gets what
        `infill.prompt` leaves of the last quarter. The last tokens of the other files fill `InfillRoom.extra`. Raises
        CallFailed: UNSUPPORTED."""
        fim = self._tokens
        if fim is None:
            message = "this model has no fill-in-the-middle tokens; ask one that is made to complete code"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "input_prefix"))
        quarter = self._room.near // 4
        prompt = parse(infill.prompt) if infill.prompt else []
        before = joined([fim.prefix], _end_of(infill.prefix, 3 * quarter, tokenize), prompt)
        behind = joined([fim.suffix], _start_of(infill.suffix, max(0, quarter - 2 - len(prompt)), tokenize))
        first, second = (behind, before) if self._room.suffix_first else (before, behind)
        begin = [] if fim.begin is None else [fim.begin]
        return joined(_extra(infill, fim, self._room.extra, tokenize), begin, first, second, [fim.middle])


def _extra(infill: Infill, fim: InfillTokens, room: int, tokenize: Tokenize) -> array[int]:
    """Return at most `room` tokens: the last ones of the other files. Files that don't fit at all are not tokenised."""
    parts = [] if fim.file is None else [joined([fim.file], tokenize(FILE))]
    num_tokens = sum(map(len, parts))
    for one in reversed(infill.files):
        if num_tokens >= room:
            break
        head = tokenize(SNIPPET) if fim.file is None else [fim.file, *tokenize(f"{one.name}\n")]
        parts.append(joined(head, _end_of(one.text, room - num_tokens, tokenize)))
        num_tokens += len(parts[-1])
    else:
        parts.append(joined() if fim.repository is None else joined([fim.repository], tokenize(REPOSITORY)))
    extra = joined(*reversed(parts))
    return extra[max(0, len(extra) - room) :]


def _end_of(text: str, num_tokens: int, tokenize: Tokenize) -> Sequence[int]:
    """Return the last `num_tokens` tokens of a text; of a long text, only the end is tokenised."""
    found = _read(text, num_tokens, tokenize, lambda size: text[len(text) - size :])
    return found[max(0, len(found) - num_tokens) :]


def _start_of(text: str, num_tokens: int, tokenize: Tokenize) -> Sequence[int]:
    """Return the first `num_tokens` tokens of a text; of a long text, only the beginning is tokenised."""
    return _read(text, num_tokens, tokenize, lambda size: text[:size])[:num_tokens]


def _read(text: str, num_tokens: int, tokenize: Tokenize, cut: Callable[[int], str]) -> Sequence[int]:
    """Return at least `num_tokens` + MARGIN tokens, read from a part of the text. If the whole text has fewer tokens,
    return all of them. `cut(size)` returns a part of `size` characters."""
    size = CHARACTERS_PER_TOKEN * (num_tokens + MARGIN)
    while size < len(text):
        found = tokenize(cut(size))
        if len(found) >= num_tokens + MARGIN:
            return found
        size *= 4
    return tokenize(text)
