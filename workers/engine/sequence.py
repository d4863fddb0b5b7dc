"""What one call is at: its tokens, its place in the KV cache, its answer so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from secrets import token_hex

import numpy as np

from workers.constraint.mask import MaskPending
from workers.engine.adapter_set import NO_ADAPTERS, AdapterSet
from workers.engine.draws import DrawCost
from workers.engine.notices import Watch
from workers.engine.picker import Picker
from workers.engine.prefix import Path, Restore, Tokens
from workers.engine.request import EngineRequest
from workers.engine.scope import Scope
from workers.engine.shares import Turn
from workers.engine.text import AnswerText
from workers.llama.context import PROMPT_LOGITS, Context
from workers.llama.samplers import SamplerChain
from workers.llama.vocab import Vocab
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Progress,
    PromptLogprobs,
    Started,
    Text,
    Timings,
    Usage,
)
from workers.protocol.failures import CallFailed, Failure, FailureCode


class Pending:
    """In the place of why an answer ends: the mask has no answer yet, and no token came."""


PENDING = Pending()

NOWHERE = -1
"""Id or slot of a sequence that holds none."""

MAX_SHIFTED_CONTEXTS = 16
"""Without `max_tokens`, an answer whose context is shifted ends when it is this many contexts long."""

NOT_A_NUMBER = Failure(
    FailureCode.INTERNAL,
    "the model computed something that is not a number: its weights, an adapter's scale or the KV type do not bear "
    "this conversation; ask again, or serve the model with another KV type",
)


NO_MEMORY = Failure(
    FailureCode.OUT_OF_MEMORY,
    "the worker had no memory for the next token of this answer, its form or its probabilities; send it again",
)

Outcome = FinishReason | Failure | Pending | None


class Sequence:
    """Made by `submit` on any thread, from then on the engine thread's own. Times are `time.perf_counter` seconds."""

    __slots__ = (
        "_base",
        "_ends",
        "_mask",
        "_n_ctx",
        "_num_prompt_told",
        "_num_untold",
        "_num_unturned",
        "_piece",
        "_ruled_out",
        "_shift",
        "_since",
        "_text",
        "_watch",
        "adapter_set",
        "chain",
        "cost",
        "decoding",
        "fetched",
        "fetching",
        "first_token_at",
        "id",
        "key",
        "limit",
        "num_cached",
        "num_cells",
        "num_fetched",
        "num_predicted",
        "num_preempted",
        "num_prompt",
        "num_restored",
        "order",
        "pending",
        "picker",
        "request",
        "restores",
        "row",
        "scope",
        "shifted",
        "slot",
        "started_at",
        "stops",
        "team",
        "token",
        "token_at",
        "turn",
        "waits_for",
        "waits_since",
        "waits_until",
        "weight",
    )

    def __init__(
        self,
        request: EngineRequest,
        chain: SamplerChain,
        vocab: Vocab,
        n_ctx: int,
        adapters: AdapterSet = NO_ADAPTERS,
        picker: Picker | None = None,
    ) -> None:
        self.request = request
        self.key = request.key
        self.chain = chain
        self.picker = picker
        """Draws for calls that want more than the chain alone does; None: this is no such call."""
        self.pending: Callable[[float], bool] | None = None
        """Its token was drawn and the mask asked: whether there is an answer, waited for so long at most."""
        self.order = (-request.priority, request.deadline, request.key)
        """Smaller goes first, and is the last to be thrown out."""
        self.team, self.weight = request.tenant, request.weight
        self.turn = Turn()
        self.cost = DrawCost(chain.draw_s)
        self.waits_since = 0.0
        """When it began to wait for a slot."""
        self.adapter_set = adapters
        self.scope = Scope(request.tenant, request.salt, adapters.key)
        self.num_prompt = len(request.tokens)
        self.limit = _limit(request, n_ctx)
        """Most tokens of the answer."""
        self.id = self.slot = NOWHERE
        """Sequence id in the cache; none while it waits."""
        self.num_cells = 0
        """Tokens at the beginning that are in the cache."""
        self.num_cached = 0
        """Prompt tokens that were not computed for this call."""
        self.num_restored = self.num_fetched = 0
        """Tokens that came back for it so far: from RAM, and to there from disk."""
        self.num_preempted = 0
        """How often it gave its cells up, or its slot to another team's call."""
        self.restores: deque[Restore] = deque()
        """Saved parts that come back before anything is computed."""
        self.waits_for: Sequence | None = None
        """Computes a prefix that this one will share, up to `waits_until` tokens."""
        self.waits_until = 0
        self.fetching = False
        """Waits for saved parts from disk."""
        self.fetched = False
        """The disk was asked."""
        self.stops: set[int] = set()
        """Lengths at which its state is to be saved: a chunk must not go past one."""
        self.decoding = False
        """All but the newest token is in the cache."""
        self.shifted = False
        """The cells are no longer what these tokens alone would give: nobody may share them."""
        self._shift = ""
        """Where this call finds its cells again after the last shift."""
        self._num_unturned = 0
        """Cells after the last shift, whose keys turn with the next step."""
        self.row = self.token = 0
        self.token_at = 0.0
        """When the step ended that made the newest token."""
        self.num_predicted = self._num_untold = 0
        self._num_prompt_told = 0 if request.tells_prompt else self.num_prompt
        """Tokens at the beginning whose probabilities are told, or are not wanted."""
        self.started_at = self.first_token_at = 0.0
        self._base: Tokens = np.asarray(request.tokens, dtype=np.int32)
        self._since: list[int] = []
        self._ruled_out = chain.ruled_out
        self._ends = vocab.eog.union(request.stop_tokens) if request.stop_tokens else vocab.eog
        self._mask = request.mask
        self._piece = _pieces(request, vocab)
        self._text = AnswerText(request.stop)
        self._watch = Watch(request) if request.is_watched else None
        self._n_ctx = n_ctx

    @property
    def num_known(self) -> int:
        """Tokens of the conversation so far, the answer's included."""
        return len(self._base) + len(self._since)

    @property
    def num_prompt_left(self) -> int:
        """Tokens to compute before the next one can be drawn; 0: it decodes."""
        return 0 if self.decoding else self.num_known - self.num_cells

    @property
    def num_next(self) -> int:
        """Most tokens of the next chunk."""
        ahead = [stop for stop in self.stops if stop > self.num_cells] if self.stops else ()
        num_next = min(ahead) - self.num_cells if ahead else self.num_prompt_left
        return min(num_next, PROMPT_LOGITS) if self.tells_prompt else num_next

    @property
    def tells_prompt(self) -> bool:
        """Whether the logits of all tokens of the next chunk are wanted."""
        return self._num_prompt_told < self.num_prompt

    @property
    def is_back(self) -> bool:
        """Whether what is to be computed was computed before it gave its cells up."""
        return self.num_predicted > 0 and not self.decoding

    @property
    def ready(self) -> bool:
        """Whether a step can do something for it: it reads its prompt, or its mask has answered."""
        may_compute = self.id != NOWHERE and not self.restores and not self.is_full
        return may_compute and (self.pending is None or not self.decoding)

    @property
    def is_full(self) -> bool:
        """Whether the cache has as much of it as it may: it computes nothing until its context is shifted."""
        return self.num_cells >= self._n_ctx and self.id != NOWHERE

    @property
    def can_be_kept(self) -> bool:
        """Whether its cells may be saved: keys that are to be turned may not."""
        return self.num_cells > self._num_unturned

    def tokens(self) -> Tokens:
        """The conversation so far. The array is not to be written to."""
        if self._since:
            self._base = np.concatenate((self._base, np.asarray(self._since, dtype=np.int32)))
            self._since = []
        return self._base

    def prompt(self) -> Tokens:
        """As it was sent, whatever was shifted since."""
        return np.asarray(self.request.tokens, dtype=np.int32)

    def path(self) -> Path:
        if self._shift:
            return Path(self.tokens(), replace(self.scope, shift=self._shift))
        return Path(self.tokens(), self.scope, self.request.num_public)

    def start(self, slot: int, now: float, events: list[CallEvent]) -> None:
        """The call holds a slot for the first time, and its cached tokens."""
        self.slot = slot
        self.started_at = now
        events.append(Started(self.key, slot, self.num_prompt, self.num_cached))
        self.tell_progress(now, events)

    def tell_progress(self, now: float, events: list[CallEvent]) -> None:
        """More of the prompt is in the cache; one that was computed before, and is computed again, is not told of."""
        if "progress" in self.request.tell and not self.num_predicted:
            time_ms = int((now - self.started_at) * 1e3)
            events.append(Progress(self.key, self.num_prompt, self.num_cached, self.num_cells, time_ms))

    def tell_prompt(self, context: Context, events: list[CallEvent]) -> Failure | None:
        """Tell how likely each token of the prompt is that follows one of the newest chunk, whose rows end at `row`.

        Return why that can't be told; None where it was. A chunk that is computed again is told of once.
        """
        assert self.picker is not None  # noqa: S101 - for the type checker
        known = min(self.num_cells + 1, self.num_prompt)
        first = max(1, self._num_prompt_told)
        rows = [(self.row - (self.num_cells - at), int(self._base[at])) for at in range(first, known)]
        if not all(context.is_number(row, token) for row, token in rows):
            return NOT_A_NUMBER
        try:
            told = self.picker.of_prompt(context, rows)
        except MemoryError:
            return NO_MEMORY
        if not self._num_prompt_told:
            told.insert(0, self.picker.without_probability(int(self._base[0])))
        self._num_prompt_told = max(known, self._num_prompt_told)
        if told:
            events.append(PromptLogprobs(self.key, tuple(told)))
        return None

    def take_chunk(self, num_tokens: int) -> Tokens:
        """The next tokens to compute; they count as cached from here on."""
        chunk = self.tokens()[self.num_cells : self.num_cells + num_tokens]
        self.num_cells += num_tokens
        return chunk

    def forget(self, start: int, end: int) -> None:
        """The conversation goes on without these tokens, and its cells are another's no more."""
        tokens = self.tokens()
        self._base = np.concatenate((tokens[:start], tokens[end:]))
        self.num_cells -= end - start
        self.shifted = True
        self._shift = token_hex(16)
        self._num_unturned = self.num_cells

    def pick(self, context: Context, events: list[CallEvent]) -> Outcome:
        """Draw the next token from the logits of its row -> why it was the last one, if it was."""
        if self.picker is not None:
            return self._pick_with(self.picker, context, events)
        if self._ruled_out is None or (token := context.likeliest(self.row)) in self._ruled_out:
            token = context.sample(self.chain.pointer, self.row)
        return self.accept(token, events) if context.is_number(self.row, token) else NOT_A_NUMBER

    def accept(self, token: int, events: list[CallEvent]) -> FinishReason | None:
        """The model said `token`: add the text that may leave to `events` -> why this was the last token, if it was."""
        self.token = token
        self.num_predicted += 1
        self._num_untold += 1
        self._since.append(token)
        reason: FinishReason | None = None
        if token in self._ends:
            is_written = self.request.special and token not in self.request.stop_tokens
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

    def cut(self, events: list[CallEvent]) -> None:
        """No more tokens are wanted: add the text that was held back to `events`."""
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
        )

    def finished(self, reason: FinishReason, now: float) -> Finished:
        """The last event of a call that ended."""
        usage = Usage(self.num_prompt, self.num_predicted, self.num_cached)
        is_full = reason is FinishReason.LENGTH and self.num_prompt + self.num_predicted >= self._n_ctx
        truncated = self.shifted or is_full
        return Finished(self.key, reason, usage, self.timings(now), self._text.stop, truncated, self.num_preempted)

    def resume(self, events: list[CallEvent]) -> Outcome:
        """Go on with the token that was drawn, as the mask may have answered."""
        assert self.picker is not None  # noqa: S101 - for the type checker
        try:
            token = self.picker.resume(events)
        except CallFailed as failed:
            return failed.failure
        except MemoryError:  # the call's own: no token was taken, and the others go on
            return NO_MEMORY
        except MaskPending as pending:
            self.pending = pending.is_ready
            return PENDING
        self.pending = None
        return self._said(token, events)

    def _pick_with(self, picker: Picker, context: Context, events: list[CallEvent]) -> Outcome:
        if self.pending is not None:
            return PENDING  # it was thrown out meanwhile, and is back
        try:
            token = picker.pick(context, self.row, events)
        except CallFailed as failed:
            return failed.failure
        except MemoryError:  # the call's own: no token was taken, and the others go on
            return NO_MEMORY
        except MaskPending as pending:
            if not context.is_number(self.row, picker.drawn):
                return NOT_A_NUMBER
            self.pending = pending.is_ready
            return PENDING
        return self._said(token, events) if context.is_number(self.row, token) else NOT_A_NUMBER

    def _said(self, token: int, events: list[CallEvent]) -> Outcome:
        return self.accept(token, events) if self._watch is None else self._watch.accept(self, token, events)


def _limit(request: EngineRequest, n_ctx: int) -> int:
    most = MAX_SHIFTED_CONTEXTS * n_ctx if request.context_shift else n_ctx - len(request.tokens)
    return most if request.max_tokens is None else min(request.max_tokens, most)


def _pieces(request: EngineRequest, vocab: Vocab) -> Callable[[int], bytes]:
    """What each token adds to the answer's text."""
    written = request.written
    if request.special:
        return vocab.special_piece
    return (lambda token: written.get(token) or vocab.piece(token)) if written else vocab.piece
