"""The state of one call in the engine: its slot, its order among other calls, and its answer so far."""

from __future__ import annotations

from collections.abc import Callable

from workers.constraint.mask import MaskPending
from workers.engine.adapters.turns import NO_ADAPTERS, AdapterSet
from workers.engine.cache.cached_sequence import NOWHERE, CachedSequence
from workers.engine.cache.prompt import Scope
from workers.engine.encoder import Encoding
from workers.engine.request import EngineRequest
from workers.engine.speculation.drafts import Drafts
from workers.engine.step.answer_text import AnswerText
from workers.engine.step.sampling import SamplingCost, TokenSampler
from workers.engine.step.shares import TimeSlice
from workers.engine.step.token_hooks import TokenHooks
from workers.llama.context import NO_NUMBER, PROMPT_LOGITS, Context
from workers.llama.sampling.samplers import SamplerChain
from workers.llama.tokens.vocab import Vocab
from workers.protocol.events import (
    CallEvent,
    CallFailed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Progress,
    PromptLogprobs,
    Started,
    Text,
    Timings,
    Usage,
)


class Pending:
    """The outcome of `pick` while the call's mask has not decided yet whether the drawn token is allowed."""


PENDING = Pending()

MAX_SHIFTED_CONTEXTS = 16
"""Maximum length of an answer with context shift, as a multiple of the context's length."""

NOT_A_NUMBER = Failure(
    FailureCode.INTERNAL,
    "the model computed something that is not a number: its weights, an adapter's scale or the KV type do not bear "
    "this conversation; ask again, or serve the model with another KV type",
)


NO_MEMORY = Failure(
    FailureCode.OUT_OF_MEMORY,
    "the worker has no memory for the next step of this answer, its form or its probabilities; send it again",
)

Outcome = FinishReason | Failure | Pending | None


class Sequence(CachedSequence):
    """One call. Made by `submit` on any thread; then only the engine's thread uses it. Times: `time.perf_counter`."""

    __slots__ = (
        *("_ends", "_hooks", "_mask", "_num_prompt_told", "_num_untold", "_piece", "_ruled_out", "_text", "is_plain"),
        *("adapter_set", "chain", "cost", "decoding", "drafts", "encodings", "first_token_at", "limit"),
        *("num_cached", "read_at"),
        *("num_predicted", "num_preempted", "order", "pending", "request", "row", "sampler", "slice", "slot"),
        *("started_at", "team", "token", "token_at", "waits_for", "waits_since", "waits_until", "weight"),
    )

    def __init__(
        self,
        request: EngineRequest,
        chain: SamplerChain,
        vocab: Vocab,
        n_ctx: int,
        adapters: AdapterSet = NO_ADAPTERS,
        sampler: TokenSampler | None = None,
    ) -> None:
        """`sampler`: draws the tokens of a call that needs more than `chain`; None: `chain` is enough."""
        asked = request.asked
        scope = Scope(request.tenant, asked.cache_salt, adapters.key)
        super().__init__(
            request.key, request.prompt, scope, n_ctx, cache_prompt=asked.cache_prompt, num_public=request.num_public
        )
        self.request = request
        self.adapter_set = adapters
        self.team, self.weight = request.tenant, request.weight
        self.order = (-asked.priority, request.deadline, request.key)
        """Sort key of calls (priority, deadline, arrival): the smallest is served first, and preempted last."""
        self.slot = NOWHERE
        """Number of the call's slot; `NOWHERE` while the call waits."""
        self.slice = TimeSlice()
        self.waits_since = 0.0
        """Time at which the call began to wait for a slot."""
        self.waits_for: Sequence | None = None
        """Another call whose prompt begins alike, and which is computing that beginning first; None: there is none."""
        self.waits_until = self.num_cached = self.num_preempted = 0
        """`waits_until`: tokens that `waits_for` must compute first. `num_cached`: prompt tokens found in the cache.
        `num_preempted`: times that the call lost its slot and cells, for lack of cells or to another team's call."""
        self.decoding = False
        """Whether all of the call's tokens except the newest are in the cache."""
        self.encodings: dict[int, Encoding] = {}
        """Number of a span -> its embeddings, from when they are needed to the end of the call."""
        self.read_at = 0.0
        """Time at which cells of a span were last computed, or at which the call got its slot."""
        self.drafts: Drafts | None = None
        """Guesses what comes next, for steps to compute beside the newest token; None: the answer is not drafted."""
        self.row = self.token = 0
        """`row`: the row of the batch from whose logits the next token is drawn. `token`: the newest token."""
        self.started_at = self.first_token_at = self.token_at = 0.0
        """`token_at`: end of the `llama_decode` that computed the logits from which the newest token was drawn."""
        self.chain, self.sampler, self.cost = chain, sampler, SamplingCost(chain.draw_s)
        self.pending: Callable[[float], bool] | None = None
        """Function that waits, for at most the given seconds, until the mask can decide on the drawn token, and returns
        whether it can. None: no decision is awaited."""
        self.limit = _limit(request, n_ctx)
        """Maximum number of the answer's tokens."""
        self.num_predicted = self._num_untold = 0
        """`num_predicted`: tokens of the answer so far. `_num_untold`: those that no `Text` event has counted yet."""
        self._num_prompt_told = 0 if asked.prompt_probs else self.num_prompt
        """Number of leading prompt tokens whose probabilities are already reported; all of them if none are wanted."""
        self._ruled_out = chain.ruled_out
        self.is_plain = sampler is None and chain.ruled_out is not None
        """Whether the likeliest token is drawn unless it is ruled out, so that `pick_likeliest` can replace `pick`."""
        self._ends = vocab.eog.union(asked.stop_tokens) if asked.stop_tokens else vocab.eog
        self._mask = request.mask
        self._piece = _pieces(request, vocab)
        self._text = AnswerText(asked.stop)
        self._hooks = TokenHooks(request) if request.has_hooks else None

    @property
    def num_prompt_left(self) -> int:
        """Return how many tokens must be computed before the next token can be drawn; 0: the call decodes."""
        return 0 if self.decoding else self.num_known - self.num_cells

    @property
    def num_next(self) -> int:
        """Return the maximum number of prompt tokens, or of cells of one span, that the next step may compute."""
        ahead = [stop for stop in self.stops if stop > self.num_cells] if self.stops else []
        for one in self.prompt.spans:
            if one.end > self.num_cells:
                ahead.append(one.start if one.start > self.num_cells else one.end)
                break
        num_next = min(ahead) - self.num_cells if ahead else self.num_prompt_left
        return min(num_next, PROMPT_LOGITS) if self.tells_prompt else num_next

    @property
    def tells_prompt(self) -> bool:
        """Return whether prompt tokens' probabilities are still to be reported: a step then needs all their logits."""
        return self._num_prompt_told < self.num_prompt

    @property
    def encoding(self) -> bool:
        """Return whether the call waits for embeddings."""
        return any(not one.is_over for one in self.encodings.values())

    @property
    def reads_media(self) -> bool:
        """Return whether the next cell to compute is of a picture or a sound."""
        return bool(self.prompt.spans) and not self.decoding and self.span != NOWHERE

    @property
    def is_back(self) -> bool:
        """Return whether the call was preempted in the middle of its answer, and must recompute tokens to go on."""
        return self.num_predicted > 0 and not self.decoding

    @property
    def ready(self) -> bool:
        """Return whether a step can compute something for the call: it waits for no restore, media, shift or mask."""
        may_compute = self.id != NOWHERE and not self.restores and not self.is_full and not self.encoding
        return may_compute and (self.pending is None or not self.decoding)

    def start(self, slot: int, now: float, events: list[CallEvent]) -> None:
        """Emit `Started` for a call in its first slot. The cached part of its prompt must be in the KV cache by now."""
        self.slot = slot
        self.started_at = now
        events.append(Started(self.key, slot, self.num_prompt, self.num_cached, self.prompt.num_media_cells))
        self.tell_progress(now, events)

    def tell_progress(self, now: float, events: list[CallEvent]) -> None:
        """Emit `Progress` if the call wants it; not for a prompt that is computed again in the middle of an answer."""
        if "progress" in self.request.asked.tell and not self.num_predicted:
            time_ms = int((now - self.started_at) * 1e3)
            events.append(Progress(self.key, self.num_prompt, self.num_cached, self.num_cells, time_ms))

    def tell_prompt(self, context: Context, events: list[CallEvent]) -> Failure | None:
        """Emit the probability of each prompt token that follows a token of the newest chunk, from the chunk's logits.

        Return why that failed, or None. `self.row` must be the chunk's last row. No token is reported a second time."""
        assert self.sampler is not None  # noqa: S101 - for the type checker
        known = min(self.num_cells + 1, self.num_prompt)
        first = max(1, self._num_prompt_told)
        rows = [(self.row - (self.num_cells - at), int(self._base[at])) for at in range(first, known)]
        if not all(context.is_number(row, token) for row, token in rows):
            return NOT_A_NUMBER
        try:
            told = self.sampler.of_prompt(context, rows)
        except MemoryError:
            return NO_MEMORY
        if not self._num_prompt_told:
            told.insert(0, self.sampler.without_probability(int(self._base[0])))
        self._num_prompt_told = max(known, self._num_prompt_told)
        if told:
            events.append(PromptLogprobs(self.key, tuple(told)))
        return None

    def pick(self, context: Context, events: list[CallEvent]) -> Outcome:
        """Draw the next token from the logits of `row`. Return why the call ends, PENDING (mask not ready), or None."""
        if self.sampler is not None:
            return self._pick_with(self.sampler, context, events)
        if self.chain.top_k:
            token = context.sample_top(self.chain.pointer, self.row, self.chain.top_k)
        elif self._ruled_out is None or (token := context.likeliest(self.row)) in self._ruled_out:
            token = context.sample(self.chain.pointer, self.row)
        return self.accept(token, events) if context.is_number(self.row, token) else NOT_A_NUMBER

    def pick_likeliest(self, token: int, context: Context, events: list[CallEvent]) -> Outcome:
        """Do what `pick` does for a call that `is_plain`. `token`: the likeliest one of `row`, or `NO_NUMBER`."""
        if token == NO_NUMBER:
            return NOT_A_NUMBER
        if self._ruled_out and token in self._ruled_out:
            return self.pick(context, events)
        return self.accept(token, events)

    def accept(self, token: int, events: list[CallEvent]) -> FinishReason | None:
        """Take a drawn token: add the text that can be sent to `events`; return why it was the last token, or None."""
        self.token = token
        self.num_predicted += 1
        self._num_untold += 1
        self._since.append(token)
        if self.drafts is not None:
            self.drafts.push(token)
        reason: FinishReason | None = None
        if token in self._ends:
            is_written = self.request.asked.special and token not in self.request.asked.stop_tokens
            text = self._text.push(self._piece(token)) if is_written else ""
            text += self._text.finish()
            reason = FinishReason.STOP
        else:
            text = self._text.push(self._piece(token))
            if self.num_predicted >= self.limit:
                text += self._text.finish()
                reason = FinishReason.LENGTH
            if self._text.stop is not None or (self._mask is not None and self._mask.is_done):
                text += self._text.finish()
                reason = FinishReason.STOP
        if text:
            events.append(Text(self.key, text, self._num_untold))
            self._num_untold = 0
        return reason

    def flush(self, events: list[CallEvent]) -> None:
        """Add the text that was held back to `events`, since no more tokens are wanted."""
        text = self._text.finish()
        if text:
            events.append(Text(self.key, text, 0))

    def timings(self, now: float) -> Timings:
        first = self.first_token_at or now
        return Timings(
            cache_n=self.num_cached,
            prompt_n=self.num_prompt - self.num_cached,
            prompt_ms=(first - self.started_at) * 1e3,
            predicted_n=self.num_predicted,
            predicted_ms=(now - first) * 1e3,
            draft_n=0 if self.drafts is None else self.drafts.num_drafted,
            draft_n_accepted=0 if self.drafts is None else min(self.drafts.num_accepted, self.num_predicted),
        )

    def finished(self, reason: FinishReason, now: float) -> Finished:
        """Return the last event of a call that ended."""
        num_media = self.prompt.num_media_cells
        usage = Usage(self.num_prompt, self.num_predicted, self.num_cached, media_tokens=num_media)
        if self.drafts is not None and self.request.prediction:
            # Of an answer that its caller has ended, tokens were dropped that had been drafted and drawn.
            num_accepted = min(self.drafts.num_foretold, self.num_predicted)
            num_drafted = self.drafts.num_of_prediction
            rejected = num_drafted - num_accepted
            usage = Usage(
                self.num_prompt, self.num_predicted, self.num_cached, num_accepted, rejected, media_tokens=num_media
            )
        is_full = reason is FinishReason.LENGTH and self.num_prompt + self.num_predicted >= self._n_ctx
        truncated = self.shifted or is_full
        return Finished(self.key, reason, usage, self.timings(now), self._text.stop, truncated, self.num_preempted)

    def resume(self, events: list[CallEvent]) -> Outcome:
        """Ask the mask again about the token that `pick` drew, now that it may decide. Return what `pick` returns."""
        assert self.sampler is not None  # noqa: S101 - for the type checker
        try:
            token = self.sampler.resume(events)
        except CallFailed as failed:
            return failed.failure
        except MemoryError:  # of this call alone: no token was taken, and the others go on
            return NO_MEMORY
        except MaskPending as pending:
            self.pending = pending.is_ready
            return PENDING
        self.pending = None
        return self._said(token, events)

    def _pick_with(self, sampler: TokenSampler, context: Context, events: list[CallEvent]) -> Outcome:
        if self.pending is not None:
            return PENDING  # the call was preempted while it waited for the mask, and is back
        try:
            token = sampler.pick(context, self.row, events)
        except CallFailed as failed:
            return failed.failure
        except MemoryError:  # of this call alone: no token was taken, and the others go on
            return NO_MEMORY
        except MaskPending as pending:
            if not context.is_number(self.row, sampler.drawn):
                return NOT_A_NUMBER
            self.pending = pending.is_ready
            return PENDING
        return self._said(token, events) if context.is_number(self.row, token) else NOT_A_NUMBER

    def _said(self, token: int, events: list[CallEvent]) -> Outcome:
        return self.accept(token, events) if self._hooks is None else self._hooks.accept(self, token, events)


def _limit(request: EngineRequest, n_ctx: int) -> int:
    asked = request.asked
    most = MAX_SHIFTED_CONTEXTS * n_ctx if asked.context_shift else n_ctx - len(request.prompt)
    return most if asked.max_tokens is None else min(asked.max_tokens, most)


def _pieces(request: EngineRequest, vocab: Vocab) -> Callable[[int], bytes]:
    """Return the function that returns the bytes which a token adds to the answer's text."""
    written = request.written
    if request.asked.special:
        return vocab.special_piece
    return (lambda token: written.get(token) or vocab.piece(token)) if written else vocab.piece
