"""Draws a token for a call that is constrained, must not end yet, is told more than its text, or samples slowly.

All other calls draw theirs with `Context.sample` alone and never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.constraint.mask import MaskPending
from workers.engine.logprobs import LogSoftmax
from workers.engine.request import EngineRequest, TokenMask
from workers.llama.candidates import Candidates, Logits, Words, without
from workers.llama.samplers import SamplerChain
from workers.llama.vocab import Vocab
from workers.protocol.events import CallEvent, Logprobs, TokenLogprob, TokenProbs
from workers.protocol.failures import CallFailed, Failure, FailureCode


class Drawing(Protocol):
    """What a picker needs of a context."""

    @property
    def pointer(self) -> int: ...

    def sample(self, chain: int, row: int) -> int: ...


class PickerTools:
    """What the pickers of one engine share, because they work one after the other."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.candidates = Candidates(vocab.num_tokens)
        self.softmax = LogSoftmax(vocab.num_tokens)

    def picker(self, request: EngineRequest, chain: SamplerChain) -> Picker | None:
        """None: the call is a plain one. `chain` was made with `masked` if the request has a mask or `min_tokens`."""
        is_free = request.mask is None and not request.min_tokens
        if is_free and not request.n_probs and not chain.slow and not request.is_watched:
            return None
        return Picker(request, chain, self)

    def unending(self, request: EngineRequest, chain: SamplerChain) -> Words:
        """Return the tokens that may be drawn while the answer must not end."""
        return without(self.vocab.num_tokens, chain.permitted, self.vocab.eog.union(request.stop_tokens))


@dataclass(slots=True)
class Draw:
    """A token that was drawn, and how far its mask has been asked about it."""

    logits: Logits
    """The row's, which probabilities are told of."""
    biased: Logits
    """It was drawn from these, and another one will be if the mask refuses it."""
    token: int = 0
    told: Logprobs | None = None
    is_permitted: bool = False
    is_accepted: bool = False
    owns_logits: bool = False

    def own_logits(self) -> None:
        """Copy them: where they are now, those of the next step will be."""
        if not self.owns_logits:
            is_biased = self.biased is not self.logits
            self.logits = self.logits.copy()
            self.biased = self.biased.copy() if is_biased else self.logits
            self.owns_logits = True


class Picker:
    """One call's. Belongs to the engine's thread."""

    __slots__ = (
        *("_chain", "_draw", "_is_free", "_key", "_mask", "_num_owed", "_num_top", "_post", "_tools", "_unending"),
        "_wants_probs",
    )

    def __init__(self, request: EngineRequest, chain: SamplerChain, tools: PickerTools) -> None:
        self._key = request.key
        self._chain = chain
        self._tools = tools
        self._mask: TokenMask | None = request.mask
        self._num_owed = request.min_tokens
        """Tokens before the answer may end."""
        self._is_free = request.mask is None and not request.min_tokens
        """The chain adds its biases itself."""
        self._unending = tools.unending(request, chain) if request.min_tokens else None
        self._wants_probs = request.n_probs != 0
        self._num_top = max(request.n_probs, 0)
        self._post = self._wants_probs and request.post_sampling_probs
        self._draw: Draw | None = None
        """While the mask has no answer."""

    @property
    def drawn(self) -> int:
        """The token that the mask is asked about."""
        return self._draw.token if self._draw is not None else 0

    def pick(self, context: Drawing, row: int, events: list[CallEvent]) -> int:
        """Draw from the logits of batch row `row`; the chain and the mask accept the token.

        Adds a `Logprobs` event where the call wants one. Raises CallFailed where no token may come, and MaskPending:
        then `resume` goes on with what was drawn.
        """
        candidates = self._tools.candidates
        if self._is_free and not self._post and not self._chain.slow:
            token = context.sample(self._chain.pointer, row)
            if self._wants_probs:
                events.append(self._logprobs(token, candidates.logits(context.pointer, row)))
            return token
        logits = candidates.logits(context.pointer, row)
        biases = self._chain.biases
        self._draw = Draw(logits, logits if biases is None else candidates.biased(logits, *biases))
        self._choose_for(self._draw, None)
        return self.resume(events)

    def of_prompt(self, context: Drawing, rows: Sequence[tuple[int, int]]) -> list[TokenProbs]:
        """Return how likely each token was by the logits of its row (`rows`: row, token), before any sampler."""
        return [self._probs(token, self._tools.candidates.logits(context.pointer, row)) for row, token in rows]

    def without_probability(self, token: int) -> TokenProbs:
        """Return what is told of a token that nothing comes before."""
        return TokenLogprob(token, self._tools.vocab.special_piece(token), 0.0), ()

    def resume(self, events: list[CallEvent]) -> int:
        """Go on with the token that was drawn, as `pick` does. Raises CallFailed, MaskPending."""
        draw = self._draw
        assert draw is not None  # noqa: S101 - for the type checker
        try:
            self._ask_mask(draw)
        except MaskPending:
            draw.own_logits()
            raise
        self._draw = None
        self._tools.candidates.accept(self._chain.pointer, draw.token)
        self._num_owed -= 1
        if draw.told is not None:
            events.append(draw.told)
        return draw.token

    def _ask_mask(self, draw: Draw) -> None:
        """As llama-server does it: a token from all that there are, and another one if the mask refuses it."""
        mask = self._mask
        if mask is None:
            return
        if not draw.is_permitted:
            if not mask.permits(draw.token):
                self._choose_for(draw, mask.allowed())
            draw.is_permitted = True
        if not draw.is_accepted:
            mask.accept(draw.token)
            draw.is_accepted = True
        _ = mask.is_done  # is asked for later, where it must not be pending any more

    def _choose_for(self, draw: Draw, allowed: Words | None) -> None:
        """Draw a token; what is told of it is seen now, as others draw with the same tools."""
        draw.token = self._choose(draw.biased, allowed)
        draw.told = self._logprobs(draw.token, draw.logits) if self._wants_probs else None

    def _choose(self, logits: Logits, allowed: Words | None) -> int:
        candidates, chain = self._tools.candidates, self._chain
        # A form that is complete ends the answer, however short it is.
        is_filled = self._num_owed > 0 and candidates.fill(logits, allowed, self._unending)
        if not is_filled and not candidates.fill(logits, allowed, chain.permitted):
            raise CallFailed(_NOTHING_LEFT)
        return candidates.choose(chain.pointer, slow=chain.slow)

    def _logprobs(self, token: int, logits: Logits) -> Logprobs:
        tools = self._tools
        if not self._post:
            return Logprobs(self._key, *self._probs(token, logits))
        if self._chain.greedy:
            return Logprobs(self._key, *self._named(token, 1.0, [(token, 1.0)][: self._num_top]))
        return Logprobs(
            self._key, *self._named(token, tools.candidates.probability(), tools.candidates.likeliest(self._num_top))
        )

    def _probs(self, token: int, logits: Logits) -> TokenProbs:
        return self._named(token, *self._tools.softmax.take(logits, token, self._num_top))

    def _named(self, token: int, probability: float, likeliest: Sequence[tuple[int, float]]) -> TokenProbs:
        piece = self._tools.vocab.special_piece
        top = tuple(TokenLogprob(other, piece(other), logprob) for other, logprob in likeliest)
        return TokenLogprob(token, piece(token), probability), top


_NOTHING_LEFT = Failure(
    FailureCode.INVALID_REQUEST,
    "the answer's grammar, schema or thinking budget allows only tokens that `logit_bias`, `ignore_eos` or the model "
    "rule out; leave one of them out",
)
