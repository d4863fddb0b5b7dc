"""Code to be completed between what stands before and behind it, as the tokens of a prompt.

Source of the order, the bounds and the words in between: `format_prompt_infill` in tools/server/server-common.cpp of
llama.cpp, the pattern for whole repositories: https://arxiv.org/abs/2409.12186.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import Infill

SNIPPET = "\n\n--- snippet ---\n\n"
REPOSITORY, FILE = "myproject\n", "filename\n"

Tokenize = Callable[[str], list[int]]
"""Text as it is: control tokens in it are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTokens:
    """A model's fill-in-the-middle tokens; None where it has no such token."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    begin: int | None = None
    """What every text begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRoom:
    """Numbers of tokens, and whether the model wants the suffix first (`spm_infill`)."""

    n_ctx: int
    n_batch: int
    suffix_first: bool = False

    @property
    def near(self) -> int:
        """For prefix and suffix; of a context hardly larger, a quarter is left for the answer."""
        return min(self.n_batch, self.n_ctx * 3 // 4)

    @property
    def extra(self) -> int:
        """For other files."""
        return max(0, self.n_ctx - self.n_batch + 2)


class InfillPrompts:
    """Stateless. `tokens` None: the model has no such tokens, and every request is refused."""

    def __init__(self, tokens: InfillTokens | None, room: InfillRoom) -> None:
        self._tokens = tokens
        self._room = room

    @property
    def are_possible(self) -> bool:
        """Return whether the model has the tokens for them."""
        return self._tokens is not None

    def tokens(self, infill: Infill, tokenize: Tokenize, parse: Tokenize) -> list[int]:
        """`parse`: as `tokenize`, but control tokens that are written out become those tokens.

        Of the prefix the last three quarters of a batch are kept, of the suffix what is left of the other quarter, of
        other files the last that fit. Raises CallFailed: UNSUPPORTED.
        """
        fim = self._tokens
        if fim is None:
            message = "this model has no fill-in-the-middle tokens; ask one that is made to complete code"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "input_prefix"))
        quarter = self._room.near // 4
        prompt = parse(infill.prompt) if infill.prompt else []
        before, behind = tokenize(infill.prefix), tokenize(infill.suffix)
        before = [fim.prefix, *before[max(0, len(before) - 3 * quarter) :], *prompt]
        behind = [fim.suffix, *behind[: max(0, quarter - 2 - len(prompt))]]
        first, second = (behind, before) if self._room.suffix_first else (before, behind)
        begin = [] if fim.begin is None else [fim.begin]
        extra = _extra(infill, fim, tokenize)
        return [*extra[max(0, len(extra) - self._room.extra) :], *begin, *first, *second, fim.middle]


def _extra(infill: Infill, fim: InfillTokens, tokenize: Tokenize) -> list[int]:
    extra = [] if fim.repository is None else [fim.repository, *tokenize(REPOSITORY)]
    for one in infill.files:
        if fim.file is None:
            extra += tokenize(SNIPPET)
        else:
            extra += [fim.file, *tokenize(f"{one.name}\n")]
        extra += tokenize(one.text)
    return extra if fim.file is None else [*extra, fim.file, *tokenize(FILE)]
