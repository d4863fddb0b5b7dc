"""Draws a token for a call that is constrained, that is told more than its text, or whose sampler takes long.

All other calls draw theirs with `Context.sample` alone and never come here.
"""

from __future__ import annotations

from typing import Protocol

from workers.engine.logprobs import LogSoftmax
from workers.engine.request import EngineRequest, TokenMask
from workers.llama.candidates import Candidates, Logits, Words
from workers.llama.samplers import SamplerChain
from workers.llama.vocab import Vocab
from workers.protocol.events import CallEvent, Logprobs, TokenLogprob
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
        """None: the call is a plain one. `chain` was made with `masked` if the request has a mask."""
        if request.mask is None and not request.n_probs and not chain.slow and not request.is_watched:
            return None
        return Picker(request, chain, self)


class Picker:
    """One call's. Belongs to the engine's thread."""

    __slots__ = ("_chain", "_key", "_mask", "_num_top", "_post", "_tools", "_wants_probs")

    def __init__(self, request: EngineRequest, chain: SamplerChain, tools: PickerTools) -> None:
        self._key = request.key
        self._chain = chain
        self._tools = tools
        self._mask: TokenMask | None = request.mask
        self._wants_probs = request.n_probs != 0
        self._num_top = max(request.n_probs, 0)
        self._post = self._wants_probs and request.post_sampling_probs

    def pick(self, context: Drawing, row: int, events: list[CallEvent]) -> int:
        """Draw from the logits of batch row `row`; the chain and the mask accept the token.

        Adds a `Logprobs` event where the call wants one. Raises CallFailed where no token may come.
        """
        if self._mask is None and not self._post and not self._chain.slow:
            token = context.sample(self._chain.pointer, row)
            if not self._wants_probs:
                return token
            logits = self._tools.candidates.logits(context.pointer, row)
        else:
            logits = self._tools.candidates.logits(context.pointer, row)
            token = self._draw(logits)
        if self._wants_probs:
            events.append(self._logprobs(token, logits))
        return token

    def _draw(self, logits: Logits) -> int:
        """As llama-server does it: a token from all that there are, and another one if the mask refuses it."""
        mask, chain, candidates = self._mask, self._chain, self._tools.candidates
        if chain.biases is not None:
            logits = candidates.biased(logits, *chain.biases)
        token = self._choose(logits, None)
        if mask is not None:
            if not mask.permits(token):
                token = self._choose(logits, mask.allowed())
            mask.accept(token)
        candidates.accept(chain.pointer, token)
        return token

    def _choose(self, logits: Logits, allowed: Words | None) -> int:
        if not self._tools.candidates.fill(logits, allowed, self._chain.permitted):
            raise CallFailed(_NOTHING_LEFT)
        return self._tools.candidates.choose(self._chain.pointer, slow=self._chain.slow)

    def _logprobs(self, token: int, logits: Logits) -> Logprobs:
        tools, piece = self._tools, self._tools.vocab.special_piece
        if not self._post:
            of_chosen, likeliest = tools.softmax.take(logits, token, self._num_top)
        elif self._chain.greedy:
            of_chosen, likeliest = 1.0, [(token, 1.0)][: self._num_top]
        else:
            of_chosen, likeliest = tools.candidates.probability(), tools.candidates.likeliest(self._num_top)
        top = tuple(TokenLogprob(other, piece(other), logprob) for other, logprob in likeliest)
        return Logprobs(self._key, TokenLogprob(token, piece(token), of_chosen), top)


_NOTHING_LEFT = Failure(
    FailureCode.INVALID_REQUEST,
    "the answer's grammar, schema or thinking budget allows only tokens that `logit_bias`, `ignore_eos` or the model "
    "rule out; leave one of them out",
)
