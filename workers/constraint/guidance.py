"""Makes masks with llguidance: JSON Schema and regular expressions are translated into Lark, and Lark is compiled.

The option `no_forcing` lets the model spell a text that the grammar demands with any tokens. Without it, llguidance
would force the tokens into which its own tokeniser splits the text: these are wrong for vocabularies that put a space
in front of a text. llguidance is written in Rust and has limits: too large a grammar is an error, not a crash.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from workers.constraint.mask import BeyondLimits, Bits, Unusable, Vocabulary, bits_for, broken
from workers.protocol.events import CallFailed

HEADER = "%llguidance"
"""First word of a Lark grammar with options; these follow it as a JSON object (llama.cpp, docs/llguidance.md)."""

WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Pattern of the whitespace between the tokens of a JSON text: one space, or new lines and an indentation. It is
bounded, so that a model can't write whitespace for ever."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds on llguidance's work in one use of a mask, such as to find out which tokens may come next."""

    max_items: int
    max_items_in_row: int
    lexer_fuel: int
    """Maximum work, in llguidance's units, on the regular expressions that the lexer follows at the same time."""


MAX_LEXER_STATES = 25_000
"""Maximum number of lexer states in one answer; each takes up to two kilobytes."""

QUICK = StepLimits(max_items=20_000, max_items_in_row=500, lexer_fuel=30_000)
"""Limits for masks computed on the engine's thread: finding the permitted tokens takes tens of milliseconds at most.
The work of llguidance's parser grows with the square of the items in a row of its table; schemas need dozens. This
`lexer_fuel` is enough for 10 ms of lexing, ten times as long as schemas take."""

WIDE = StepLimits(max_items=50_000, max_items_in_row=2_000, lexer_fuel=200_000)
"""Wider limits, for a mask in a process of its own: it may take longer, as the engine's thread does not wait."""

LIMITS = re.compile(r"row has \d+ items|Too many items|too many expressions")
"""llguidance's messages when a limit of `StepLimits` is exceeded."""

REASON_CHARS = 300

MAX_FORCING_CHARS = 16_384
"""Maximum length of a grammar whose masks tell which text must come next: of long ones that takes 10 ms."""
MAX_FORCED_BYTES, MAX_FORCING_S = 256, 0.002
"""Bytes of such a text that are told, and the seconds after which a mask is not asked for it any more."""


class _Words:
    """A vocabulary in the form that llguidance reads."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab: Vocabulary) -> None:
        self.eos_token_id = vocab.eos if vocab.eos >= 0 else min(vocab.eog, default=0)
        self.bos_token_id = vocab.bos if vocab.bos >= 0 else None
        pieces = [vocab.piece(token) for token in range(vocab.num_tokens)]
        # Tokens without text count as special, so that no text matches them: they neither end nor continue an answer.
        self.special_token_ids = [t for t, piece in enumerate(pieces) if not piece or t in vocab.eog]
        self.tokens: Sequence[bytes] = [piece or b"<|%d|>" % token for token, piece in enumerate(pieces)]

    def __call__(self, text: str | bytes) -> list[int]:
        raise TypeError("with `no_forcing` llguidance does not tokenise")


def tokenizer(vocab: Vocabulary) -> LLTokenizer:
    """Return llguidance's tokeniser, safe to use from several threads. Takes about a second for 150,000 tokens."""
    words: Any = _Words(vocab)
    return LLTokenizer(words, n_vocab=vocab.num_tokens, eos_token=sorted(vocab.eog) or [words.eos_token_id])


def schema_to_lark(schema: object, rule: str = "start") -> str:
    """Return the Lark rule for a schema that `workers.constraint.languages.schema` has found enforceable."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"{rule}: %json {json.dumps(schema)}\n"


def regex_to_lark(regex: str) -> str:
    grammar = json.loads(LLMatcher.grammar_from_regex(regex))
    return str(grammar["grammars"][0]["lark_grammar"])


class Grammar:
    """A compiled grammar. Immutable: `mask` may be called from several threads."""

    def __init__(self, words: LLTokenizer, lark: str, limits: StepLimits = WIDE) -> None:
        """Compile the grammar. Raises Unusable."""
        parser_limits = LLParserLimits(
            step_max_items=limits.max_items,
            max_items_in_row=limits.max_items_in_row,
            max_lexer_states=MAX_LEXER_STATES,
            step_lexer_fuel=limits.lexer_fuel,
            verbose_errors=False,
        )
        self._matcher = LLMatcher(words, without_forcing(lark), log_level=0, limits=parser_limits)
        self._eog = frozenset(words.eos_tokens)
        self._tells_forced = len(lark) <= MAX_FORCING_CHARS
        self._words = words
        if self._matcher.is_error():
            raise _unusable(_reason(self._matcher))
        try:
            self.mask().allowed()  # some limits are checked only at the first token
        except CallFailed as failed:
            raise _unusable(failed.failure.message) from None

    def mask(self) -> GuidanceMask:
        return GuidanceMask(self._matcher.deep_copy(), self._words, self._eog, tells_forced=self._tells_forced)

    def mask_after(self, begun: bytes) -> GuidanceMask | None:
        """Return a mask for the text after `begun`; None if no answer can begin with `begun`."""
        mask = self.mask()
        return mask if mask.feed(self.tokens(begun)) else None

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        """Return the first of `beginnings` that no answer can begin with, or None."""
        return next((begun for begun in beginnings if self.mask_after(begun) is None), None)

    def tokens(self, begun: bytes) -> list[int]:
        """Return tokens that together make the text `begun`."""
        return self._words.greedy_tokenize(begun.decode())


class GuidanceMask:
    __slots__ = ("_address", "_bits", "_eog", "_matcher", "_size", "_tells_forced", "_words", "is_done")

    def __init__(
        self, matcher: LLMatcher, words: LLTokenizer, eog: frozenset[int], *, tells_forced: bool = False
    ) -> None:
        """`tells_forced`: whether `forced` may be asked; else it returns nothing."""
        self._matcher = matcher
        self._tells_forced = tells_forced
        self._words = words
        self._eog = eog
        self._bits = bits_for(words.vocab_size)
        self._address, self._size = self._bits.ctypes.data, self._bits.nbytes
        self.is_done = matcher.is_stopped()

    @property
    def is_beyond_limits(self) -> bool:
        """Whether the matcher exceeded its limits (or has another error): the mask can't be used any more."""
        return self._matcher.is_error()

    def permits(self, token: int) -> bool:
        if token in self._eog:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 1

    def allowed(self) -> Bits | None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._size)
        if not self._bits.any() or self._matcher.is_error():
            raise broken(_reason(self._matcher) or "no token of this model can follow")
        return self._bits

    def accept(self, token: int) -> None:
        if token in self._eog and self._matcher.is_accepting():
            return
        if not self._matcher.consume_token(token):
            raise broken(_reason(self._matcher))
        self.is_done = self._matcher.is_stopped()

    def forced(self) -> Sequence[int]:
        """Return tokens of the beginning of the text that must come next. Takes 0.1 ms; no more is asked of a mask that
        takes longer.

        A copy is asked, since asking uses up what a matcher may do: after a text of 16 KB it refuses tokens."""
        if not self._tells_forced:
            return ()
        start = time.perf_counter()
        matcher = self._matcher.deep_copy()
        text = matcher.compute_ff_bytes()[:MAX_FORCED_BYTES]
        self._tells_forced = not matcher.is_error() and time.perf_counter() - start < MAX_FORCING_S
        return self._words.greedy_tokenize(text.decode("utf-8", "ignore")) if text else ()

    def feed(self, tokens: list[int]) -> bool:
        """Accept the tokens one after the other; return whether the grammar allows all of them."""
        fits = self._matcher.try_consume_tokens(tokens) == len(tokens)
        self.is_done = self._matcher.is_stopped()
        return fits


def without_forcing(lark: str) -> str:
    """Return the grammar with `no_forcing` among its options. Raises Unusable if the options are not a JSON object."""
    first, _, rest = lark.lstrip().partition("\n")
    if not first.startswith(HEADER):
        return f'{HEADER} {{"no_forcing": true}}\n{lark}'
    try:
        options = json.loads(first.removeprefix(HEADER))
        return f"{HEADER} {json.dumps({**options, 'no_forcing': True})}\n{rest}"
    except (ValueError, TypeError, RecursionError):
        raise Unusable(f"what follows {HEADER} on its line is no JSON object; write {HEADER} {{}}") from None


def _unusable(reason: str) -> Unusable:
    return BeyondLimits(reason) if LIMITS.search(reason) else Unusable(reason)


def _reason(matcher: LLMatcher) -> str:
    """Return the matcher's error on one line, without the copy of the grammar that llguidance adds."""
    lines = matcher.get_error().split("\n<non-verbose/>")[0].splitlines()
    kept = [line.strip() for line in lines if not line.lstrip().split("|")[0].strip().isdigit()]
    reason = " ".join(line for line in kept if line.strip("^ "))
    return reason if len(reason) <= REASON_CHARS else reason[: REASON_CHARS - 3] + "..."
