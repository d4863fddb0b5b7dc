"""The state of one call: its tokens, its place in the KV cache, its answer so far."""

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
    """The outcome of drawing a token for which the mask has no answer yet: no token came."""


PENDING = Pending()

NOWHERE = -1
"""Sequence id or slot of a call that holds none."""

MAX_SHIFTED_CONTEXTS = 16
"""Length, in contexts, at which an answer with context shift and without `max_tokens` ends."""

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
    """One call. `submit` makes it on any thread; then it is the engine thread's. Times: `time.perf_counter` seconds."""

    __slots__ = (
        "_base",
        "_ends",
        "_mask",
        "_n_ctx",
        "_num_prompt_told",
        "_num_untold",
        "_num_unturned",
        "_own",
        "_piece",
        "_ruled_out",
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
        """Draws the tokens of calls that need more than the chain alone; None: this call does not."""
        self.pending: Callable[[float], bool] | None = None
        """Waits at most so many seconds for the mask's answer on the drawn token, and tells whether it is there."""
        self.order = (-request.priority, request.deadline, request.key)
        """The smallest goes first, and is the last to be preempted."""
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
        """Sequence id in the cache, and slot; `NOWHERE` while it waits."""
        self.num_cells = 0
        """Tokens at the beginning that are in the cache."""
        self.num_cached = 0
        """Prompt tokens that were not computed for this call."""
        self.num_restored = self.num_fetched = 0
        """Tokens restored for it so far from RAM, and tokens fetched for it from disk to RAM."""
        self.num_preempted = 0
        """Times that it lost its cells, or gave its slot to another team's call."""
        self.restores: deque[Restore] = deque()
        """Saved blocks to restore before anything is computed."""
        self.waits_for: Sequence | None = None
        """The call that computes a prefix which this one will share, up to `waits_until` tokens."""
        self.waits_until = 0
        self.fetching = False
        """Whether it waits for blocks from disk."""
        self.fetched = False
        """Whether the disk was asked for its blocks."""
        self.stops: set[int] = set()
        """Lengths at which its state is to be saved: a chunk must not go past one."""
        self.decoding = False
        """Whether all its tokens but the newest are in the cache."""
        self.shifted = False
        """Whether its context was shifted: no call may share its cells, as they are not what its tokens alone give."""
        self._own = "" if request.cache_prompt else token_hex(16)
        """Name by which this call alone finds its cells again: without `cache_prompt`, and after its last shift."""
        self._num_unturned = 0
        """Cells at the last shift, whose keys are rotated in the next step."""
        self.row = self.token = 0
        self.token_at = 0.0
        """When the step that made the newest token ended."""
        self.num_predicted = self._num_untold = 0
        self._num_prompt_told = 0 if request.tells_prompt else self.num_prompt
        """Prompt tokens at the beginning whose probabilities were told, or are not wanted."""
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
        """Return the tokens of the conversation so far, the answer's included."""
        return len(self._base) + len(self._since)

    @property
    def num_prompt_left(self) -> int:
        """Return the tokens to compute before the next one can be drawn; 0: it decodes."""
        return 0 if self.decoding else self.num_known - self.num_cells

    @property
    def num_next(self) -> int:
        """Return the most tokens of the next chunk."""
        ahead = [stop for stop in self.stops if stop > self.num_cells] if self.stops else ()
        num_next = min(ahead) - self.num_cells if ahead else self.num_prompt_left
        return min(num_next, PROMPT_LOGITS) if self.tells_prompt else num_next

    @property
    def tells_prompt(self) -> bool:
        """Return whether the logits of all tokens of the next chunk are wanted."""
        return self._num_prompt_told < self.num_prompt

    @property
    def is_back(self) -> bool:
        """Return whether the call was preempted in its answer and computes its tokens again."""
        return self.num_predicted > 0 and not self.decoding

    @property
    def ready(self) -> bool:
        """Return whether a step can compute something for it: it waits for no restore, context shift or mask."""
        may_compute = self.id != NOWHERE and not self.restores and not self.is_full
        return may_compute and (self.pending is None or not self.decoding)

    @property
    def is_full(self) -> bool:
        """Return whether it has `n_ctx` cells: it computes nothing until its context is shifted."""
        return self.num_cells >= self._n_ctx and self.id != NOWHERE

    @property
    def can_be_kept(self) -> bool:
        """Return whether its cells may be saved: keys that are still to be rotated may not."""
        return self.num_cells > self._num_unturned

    @property
    def is_alone(self) -> bool:
        """Whether nobody else may share its cells, so that they are kept for as long as the call lives."""
        return bool(self._own)

    def tokens(self) -> Tokens:
        """Return the conversation's tokens so far. The array must not be written to."""
        if self._since:
            self._base = np.concatenate((self._base, np.asarray(self._since, dtype=np.int32)))
            self._since = []
        return self._base

    def prompt(self) -> Tokens:
        """Return the prompt as it was sent, whatever was shifted since."""
        return np.asarray(self.request.tokens, dtype=np.int32)

    def path(self) -> Path:
        if self._own:
            return Path(self.tokens(), replace(self.scope, own=self._own))
        return Path(self.tokens(), self.scope, self.request.num_public)

    def start(self, slot: int, now: float, events: list[CallEvent]) -> None:
        """Emit `Started`: the call holds a slot for the first time, and its cached tokens."""
        self.slot = slot
        self.started_at = now
        events.append(Started(self.key, slot, self.num_prompt, self.num_cached))
        self.tell_progress(now, events)

    def tell_progress(self, now: float, events: list[CallEvent]) -> None:
        """Emit `Progress` if the call wants it; a prompt that is computed again after a token came is not reported."""
        if "progress" in self.request.tell and not self.num_predicted:
            time_ms = int((now - self.started_at) * 1e3)
            events.append(Progress(self.key, self.num_prompt, self.num_cached, self.num_cells, time_ms))

    def tell_prompt(self, context: Context, events: list[CallEvent]) -> Failure | None:
        """Emit the probability of each prompt token that follows one of the newest chunk, whose rows end at `row`.

        Return why that failed; None: it did not. A chunk that is computed again is reported once.
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
        """Return the next tokens to compute; they count as cached from here on."""
        chunk = self.tokens()[self.num_cells : self.num_cells + num_tokens]
        self.num_cells += num_tokens
        return chunk

    def forget(self, start: int, end: int) -> None:
        """Drop tokens [start, end) from the conversation, whose cells no other call may share any more."""
        tokens = self.tokens()
        self._base = np.concatenate((tokens[:start], tokens[end:]))
        self.num_cells -= end - start
        self.shifted = True
        self._own = token_hex(16)
        self._num_unturned = self.num_cells

    def pick(self, context: Context, events: list[CallEvent]) -> Outcome:
        """Draw the next token from the logits of its row; return why it was the last one, or None."""
        if self.picker is not None:
            return self._pick_with(self.picker, context, events)
        if self._ruled_out is None or (token := context.likeliest(self.row)) in self._ruled_out:
            token = context.sample(self.chain.pointer, self.row)
        return self.accept(token, events) if context.is_number(self.row, token) else NOT_A_NUMBER

    def accept(self, token: int, events: list[CallEvent]) -> FinishReason | None:
        """Take a drawn token: add the text that may leave to `events`; return why it was the last token, or None."""
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
        )

    def finished(self, reason: FinishReason, now: float) -> Finished:
        """Return the last event of a call that ended."""
        usage = Usage(self.num_prompt, self.num_predicted, self.num_cached)
        is_full = reason is FinishReason.LENGTH and self.num_prompt + self.num_predicted >= self._n_ctx
        truncated = self.shifted or is_full
        return Finished(self.key, reason, usage, self.timings(now), self._text.stop, truncated, self.num_preempted)

    def resume(self, events: list[CallEvent]) -> Outcome:
        """Go on with the drawn token, since the mask may have answered."""
        assert self.picker is not None  # noqa: S101 - for the type checker
        try:
            token = self.picker.resume(events)
        except CallFailed as failed:
            return failed.failure
        except MemoryError:  # of this call alone: no token was taken, and the others go on
            return NO_MEMORY
        except MaskPending as pending:
            self.pending = pending.is_ready
            return PENDING
        self.pending = None
        return self._said(token, events)

    def _pick_with(self, picker: Picker, context: Context, events: list[CallEvent]) -> Outcome:
        if self.pending is not None:
            return PENDING  # it was preempted meanwhile, and is back
        try:
            token = picker.pick(context, self.row, events)
        except CallFailed as failed:
            return failed.failure
        except MemoryError:  # of this call alone: no token was taken, and the others go on
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
    """Return the function from a token to the bytes that it adds to the answer's text."""
    written = request.written
    if request.special:
        return vocab.special_piece
    return (lambda token: written.get(token) or vocab.piece(token)) if written else vocab.piece
