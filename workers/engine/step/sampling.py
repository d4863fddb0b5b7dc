"""Draws tokens for calls that need more than llama.cpp's chain of samplers, within a bound on a step's time.

These calls have a mask (their answer's form), must not end yet, report more than their text, or sample slowly. Other
calls draw with `Context.sample` alone and never come here.

For most calls, drawing a token takes microseconds. For slow calls it takes milliseconds (samplers that sort the
vocabulary, probabilities, masks). Slow calls share `SHARE_S` of each step, and take turns if that is too little; the
other calls don't wait for them. A call that exceeds its own bound is ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workers.constraint.mask import MaskPending
from workers.engine.request import EngineRequest, TokenMask
from workers.llama.context import Context
from workers.llama.sampling.candidates import Candidates, Logits, Words, without
from workers.llama.sampling.samplers import SamplerChain
from workers.llama.tokens.vocab import Vocab
from workers.protocol.events import CallEvent, CallFailed, Failure, FailureCode, Logprobs, TokenLogprob, TokenProbs

LOWEST = float(np.finfo(np.float32).min)
"""Reported as the logarithm of 0, for which JSON has no number; llama-server reports the same."""

BLOCK_LOGITS = 64


class LogSoftmax:
    """Computes log probabilities of tokens from a row's logits before any sampler. For the engine's thread only.

    The numbers are those of llama-server: the natural logarithm of the softmax over the whole vocabulary
    (`get_token_probabilities` in tools/server/server-common.cpp of llama.cpp)."""

    def __init__(self, num_tokens: int) -> None:
        """Allocate working memory for a vocabulary of `num_tokens` tokens."""
        self.num_tokens = num_tokens
        num_blocks = -(-num_tokens // BLOCK_LOGITS)
        self._scratch = np.empty(num_tokens, np.float32)
        self._padded = np.full(num_blocks * BLOCK_LOGITS, -np.inf, np.float32)
        self._row = self._padded[:num_tokens]
        self._blocks = self._padded.reshape(num_blocks, BLOCK_LOGITS)

    def take(self, logits: NDArray[np.float32], chosen: int, count: int) -> tuple[float, list[tuple[int, float]]]:
        """Return the chosen token's log probability, and the `count` likeliest tokens with theirs, best first."""
        np.copyto(self._row, logits)
        tops = self._blocks.max(axis=1)
        highest = float(tops.max())
        with np.errstate(invalid="ignore"):
            np.subtract(self._row, np.float32(highest), out=self._scratch)
            np.exp(self._scratch, out=self._scratch)
        log_sum = math.log(float(self._scratch.sum()))
        best = self._likeliest(tops, min(count, self.num_tokens)).tolist()
        likeliest = [(token, _bounded(float(self._row[token]) - highest - log_sum)) for token in best]
        return _bounded(float(self._row[chosen]) - highest - log_sum), likeliest

    def _likeliest(self, tops: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """Return the `count` likeliest tokens, best first. `tops`: the highest logit of each block of BLOCK_LOGITS."""
        if count <= 0:
            return np.empty(0, np.intp)
        if count >= len(tops):
            return np.argsort(-self._row, kind="stable")[:count]
        blocks = np.sort(np.argpartition(tops, len(tops) - count)[len(tops) - count :])
        order = np.argsort(-self._blocks[blocks].ravel(), kind="stable")[:count]
        best: NDArray[np.intp] = blocks[order // BLOCK_LOGITS] * BLOCK_LOGITS + order % BLOCK_LOGITS
        return best


def _bounded(logprob: float) -> float:
    """Return a log probability that JSON has a number for: `LOWEST` for the logarithm of 0, and for none at all, as
    logits give that a model with too large numbers computes. JSON would say null, which no gateway can read."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


class SamplerTools:
    """Working memory and vocabulary that all samplers of one engine share, since they work one after the other."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.candidates = Candidates(vocab.num_tokens)
        self.softmax = LogSoftmax(vocab.num_tokens)

    def sampler(self, request: EngineRequest, chain: SamplerChain) -> TokenSampler | None:
        """Return the call's sampler; None: `chain` alone is enough. If the call has a mask or `min_tokens`, `chain`
        must have been made with `masked` set to True."""
        is_free = request.mask is None and not request.asked.min_tokens
        if is_free and not request.asked.n_probs and not chain.slow and not request.has_hooks:
            return None
        return TokenSampler(request, chain, self)

    def unending(self, request: EngineRequest, chain: SamplerChain) -> Words:
        """Return the tokens that can be drawn while the answer must not end yet, as a bit mask."""
        return without(self.vocab.num_tokens, chain.permitted, self.vocab.eog.union(request.asked.stop_tokens))


@dataclass(slots=True)
class Draw:
    """A token that was drawn, and whether the call's mask has permitted and accepted it yet."""

    logits: Logits
    """Logits of the row, from which probabilities are computed."""
    biased: Logits
    """Logits with biases, from which the token was drawn; if the mask refuses it, another one is drawn from them."""
    token: int = 0
    told: Logprobs | None = None
    is_permitted: bool = False
    is_accepted: bool = False
    owns_logits: bool = False

    def own_logits(self) -> None:
        """Copy the logits, since the next step overwrites them in place."""
        if not self.owns_logits:
            is_biased = self.biased is not self.logits
            self.logits = self.logits.copy()
            self.biased = self.biased.copy() if is_biased else self.logits
            self.owns_logits = True


class TokenSampler:
    """Draws the tokens of one call. For the engine's thread only."""

    __slots__ = (
        *("_chain", "_draw", "_is_free", "_key", "_mask", "_num_owed", "_num_top", "_post", "_tools", "_unending"),
        "_wants_probs",
    )

    def __init__(self, request: EngineRequest, chain: SamplerChain, tools: SamplerTools) -> None:
        self._key = request.key
        self._chain = chain
        self._tools = tools
        self._mask: TokenMask | None = request.mask
        self._num_owed = request.asked.min_tokens
        """Number of tokens that must still be drawn before the answer may end."""
        self._is_free = request.mask is None and not request.asked.min_tokens
        """Whether neither a mask nor `min_tokens` restricts the tokens; then the chain itself adds the biases."""
        self._unending = tools.unending(request, chain) if request.asked.min_tokens else None
        self._wants_probs = request.asked.n_probs != 0
        self._num_top = max(request.asked.n_probs, 0)
        self._post = self._wants_probs and request.asked.post_sampling_probs
        self._draw: Draw | None = None
        """The drawn token on which the mask has not decided yet; None: there is none."""

    @property
    def drawn(self) -> int:
        """Return the drawn token on which the mask has not decided yet; 0 if there is none."""
        return self._draw.token if self._draw is not None else 0

    def pick(self, context: Context, row: int, events: list[CallEvent]) -> int:
        """Draw a token from the logits of batch row `row`, and have the chain and the mask accept it.

        Adds a `Logprobs` event to `events` if the call wants it. Raises CallFailed if no token is allowed; MaskPending
        if the mask needs more time to decide on the token: call `resume` later to continue with the same token."""
        candidates = self._tools.candidates
        if self._is_free and not self._post and not self._chain.slow:
            pointer, top_k = self._chain.pointer, self._chain.top_k
            token = context.sample_top(pointer, row, top_k) if top_k else context.sample(pointer, row)
            if self._wants_probs:
                events.append(self._logprobs(token, candidates.logits(context.pointer, row)))
            return token
        logits = candidates.logits(context.pointer, row)
        biases = self._chain.biases
        self._draw = Draw(logits, logits if biases is None else candidates.biased(logits, *biases))
        self._choose_for(self._draw, None)
        return self.resume(events)

    def of_prompt(self, context: Context, rows: Sequence[tuple[int, int]]) -> list[TokenProbs]:
        """Return, for each (row, token) of `rows`, the token's probability by the row's logits, before any sampler."""
        return [self._probs(token, self._tools.candidates.logits(context.pointer, row)) for row, token in rows]

    def without_probability(self, token: int) -> TokenProbs:
        """Return the entry to report for a prompt's first token, which has no probability."""
        return TokenLogprob(token, self._tools.vocab.special_piece(token), 0.0), ()

    def resume(self, events: list[CallEvent]) -> int:
        """Return the token that `pick` drew; another one if the mask refuses it. Events and errors are as in `pick`."""
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
        """Have the mask check the drawn token; if the mask refuses it, draw an allowed one, as llama-server does."""
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
        _ = mask.is_done  # may raise MaskPending here; later, in `Sequence.accept`, the mask must not be pending

    def _choose_for(self, draw: Draw, allowed: Words | None) -> None:
        """Draw an allowed token (None: any) and compute its probability now, before another draw reuses the memory."""
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
        probability = tools.candidates.probability()
        if not math.isfinite(probability):
            raise CallFailed(_NO_PROBABILITY)
        return Logprobs(self._key, *self._named(token, probability, tools.candidates.likeliest(self._num_top)))

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


_NO_PROBABILITY = Failure(
    FailureCode.INVALID_REQUEST,
    "these samplers leave numbers that are no probabilities; with `post_sampling_probs`, set `temperature`, "
    "`dynatemp_range` and `top_n_sigma` to 0 or further from it, and rule out fewer tokens",
)

QUICK_S = 0.001
"""A call that draws a token within this many seconds on average is quick, and takes part in every step."""

SHARE_S = 0.02
"""Maximum seconds of one step for all slow calls together; a single slow call is allowed more."""

MAX_DRAW_S = 0.1
"""Seconds for drawing a token beyond which a call runs up a debt (`SamplingCost.debt_s`)."""
MAX_DEBT_S = 1.0
"""Maximum debt of a call, in seconds. If it is exceeded while other calls run, the call is ended."""

FIRST_TOKENS = 512
"""Number of prompt tokens. A slow call with more left is in every step, as one step hardly finishes its prompt."""

PASSED_S, PASSED_TOKENS = 0.15, 64
"""Bounds for passing over slow calls that already decode. They are left out of a step if a call before its first token
has at most `PASSED_TOKENS` prompt tokens left, unless their newest token is at least `PASSED_S` seconds old."""

WEIGHT = 0.2
"""Weight of the newest token in `SamplingCost.mean_s`."""


@dataclass(slots=True)
class SamplingCost:
    """Cost of drawing a call's tokens, in processor seconds of the engine's thread: other programs do not count."""

    mean_s: float = 0.0
    """Running mean of the seconds per token; it begins with an estimate."""
    debt_s: float = 0.0
    """Seconds by which tokens took longer than `MAX_DRAW_S` each, minus what quicker ones took less; at least 0."""

    @property
    def is_quick(self) -> bool:
        return self.mean_s <= QUICK_S

    def note(self, seconds: float) -> None:
        """Update mean and debt with the seconds that drawing one token took."""
        self.mean_s += WEIGHT * (seconds - self.mean_s)
        self.debt_s = max(0.0, self.debt_s + seconds - MAX_DRAW_S)

    def failure(self) -> Failure | None:
        """Return why the call must end if other calls run; None: it may continue."""
        if self.debt_s <= MAX_DEBT_S:
            return None
        message = (
            f"drawing a token of this answer takes {self.mean_s * 1e3:.0f} ms, and may take {MAX_DRAW_S * 1e3:.0f} "
            "beside other calls; leave out `samplers` that sort the vocabulary, `n_probs`, or the answer's form"
        )
        return Failure(FailureCode.INVALID_REQUEST, message)


class Drawer(Protocol):
    """The attributes of a call that `within_share` needs."""

    @property
    def cost(self) -> SamplingCost: ...

    @property
    def decoding(self) -> bool: ...

    @property
    def num_predicted(self) -> int:
        """Return the number of tokens of the call's answer so far."""
        ...

    @property
    def num_prompt_left(self) -> int:
        """Return how many tokens must be computed before the call's next token can be drawn; 0: it decodes."""
        ...

    @property
    def token_at(self) -> float:
        """Return when the call's newest token was computed, in seconds of any clock; 0: it has none."""
        ...

    @property
    def started_at(self) -> float:
        """Return when the call started in its first slot, by the clock of `token_at`; 0: not yet."""
        ...


S = TypeVar("S", bound=Drawer)


def within_share(ready: Sequence[S], now: float) -> list[S]:
    """Return the calls for the next step: all quick ones, and some slow ones. `now`: by the clock of `token_at`.

    Slow calls, including those about to draw their first token, are chosen in order of how long they have waited, at
    least one, and more while their mean times fit `SHARE_S`. But if some call may get its first token in this step,
    slow calls that already decode are left out, unless their newest token is at least `PASSED_S` seconds old."""
    slow = [one for one in ready if not one.cost.is_quick and one.num_prompt_left <= FIRST_TOKENS]
    if not slow:
        return list(ready)
    passed = set[int]()
    if any(0 < one.num_prompt_left <= PASSED_TOKENS and not one.num_predicted for one in ready):
        passed = {id(one) for one in slow if one.decoding and now - one.token_at < PASSED_S}
    left = SHARE_S
    slow = [one for one in slow if id(one) not in passed]
    for place, one in enumerate(sorted(slow, key=lambda one: max(one.token_at, one.started_at))):
        if place and one.cost.mean_s > left:
            passed.add(id(one))
        else:
            left -= one.cost.mean_s
    return [one for one in ready if id(one) not in passed]
