"""Adds drafts to steps without prompts where they bring more tokens per second, and learns from what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from workers.engine.pace import AnswerLengths
from workers.engine.speculation.draft_model import DraftModel
from workers.engine.speculation.drafts import Drafts
from workers.engine.speculation.hit_rates import HitRates, Source
from workers.engine.speculation.pools import MAX_ANSWER_TOKENS, Pools
from workers.engine.speculation.step_costs import MAX_CREDIT_S, StepCosts
from workers.engine.step.model_drafts import ModelDrafts, Offer
from workers.engine.step.sampling import SHARE_S
from workers.engine.step.sequence import Sequence
from workers.engine.step.step_plan import Decode, Plan
from workers.llama.context import Context
from workers.models.generation import SpeculationSettings

LOOK_S, LOOK_SHARE = 20e-6, 0.02
"""Looking for drafts takes some `LOOK_S` seconds for each call, and at most `LOOK_SHARE` of the time of steps: where a
step is shorter than a millisecond for each call, drafts are not looked for before every step."""


MAX_LOOK_S = 0.005
"""Maximum seconds of a step for looking for drafts: answers with a form can take two milliseconds each."""


AS_IT_PAYS = SpeculationSettings()


@dataclass(frozen=True, slots=True)
class DraftSources:
    """Where the drafts of an engine come from."""

    settings: SpeculationSettings = AS_IT_PAYS
    model: DraftModel | None = None
    """The model of `settings.draft`."""


class Speculator:
    """Drafts the answers of one engine. Only the engine's thread uses it, but for `drafts_for`."""

    def __init__(
        self,
        sources: DraftSources,
        context: Context,
        row_s: Callable[[], float],
        lengths: AnswerLengths,
        *,
        n_ctx: int,
    ) -> None:
        """`row_s()`: seconds that a row takes in steps that read prompts, 0 if not known yet. `n_ctx`: maximum length
        of one conversation, tokens. Nothing is drafted where memory can't drop the cells of the last tokens."""
        settings, model = sources.settings, sources.model
        self._costs = StepCosts(row_s, MAX_CREDIT_S if model is not None else 0.0)
        self._rates = HitRates()
        self._model: ModelDrafts | None = None
        if model is not None and settings.draft is not None:
            self._model = ModelDrafts(
                model,
                settings.draft,
                self._costs,
                self._rates,
                lengths,
                num_params=context.model.facts.n_params,
            )
            context.memory.follower = model
        self._memory = context.memory
        self._before_s = 0.0
        """Seconds that the draft model has taken for the step to come."""
        self._pools = Pools()
        self._n_ctx = n_ctx
        self._max_rows = min(context.n_batch, context.n_ubatch)
        self._most_drafted = context.memory.most_cut
        self._most_calls = context.num_sequences if context.memory.kind.by_range else 1
        """Maximum calls of a step with drafts. llama.cpp cuts a step whose calls have different numbers of rows in
        parts, and moves recurrent states between these without the older states to go back to."""
        self._is_able = self._most_drafted > 0 and (settings.ngram or self._model is not None)
        self._uses_text, self._uses_form = settings.ngram, settings.form
        self._waited_s = 0.0
        """Seconds of the steps since drafts were last looked for."""
        self.num_drafts = 0
        self.num_drafted = [0] * len(Source)
        self.num_accepted = [0] * len(Source)
        """Tokens that steps computed as drafts, and those of them that were drawn, by `Source`."""

    def drafts_for(self, sequence: Sequence, prediction: Ordered[int]) -> Drafts | None:
        """Return what drafts an answer; None if it is not to be drafted. For any thread."""
        asked = sequence.request.asked.speculation
        if not self._is_able or not asked.enabled:
            return None
        return Drafts(
            np.asarray(sequence.prompt.texts(), dtype=np.int32) if sequence.prompt.spans else sequence.tokens(),
            self._rates,
            room=sequence.limit,
            is_greedy=sequence.chain.greedy,
            prediction=prediction if self._uses_text else (),
            searches=self._uses_text,
            forced=None if sequence.request.mask is None or not self._uses_form else sequence.request.mask.forced,
        )

    def join(self, sequence: Sequence) -> None:
        """Let a call that begins draft from earlier answers of its scope, unless it may not use what is cached."""
        if sequence.drafts is not None and sequence.cache_prompt and self._uses_text:
            sequence.drafts.share(self._pools.find(sequence.scope))

    def ended(self, sequence: Sequence) -> None:
        """Keep an answer for drafts of its scope."""
        if sequence.drafts is not None and sequence.cache_prompt and sequence.num_predicted:
            self._pools.add(sequence.scope, sequence.drafts.newest(MAX_ANSWER_TOKENS))

    def extend(self, plan: Plan[Sequence], has_room: Callable[[int], bool]) -> Plan[Sequence] | None:
        """Return the plan with drafts; None if none pay. `has_room(n)` makes room for n cells, if it can."""
        num_calls = len(plan.decode)
        if self._waited_s < LOOK_S * num_calls / LOOK_SHARE or num_calls > self._most_calls:
            return None
        self._waited_s = 0.0
        offers = self._offers(plan, num_calls)
        is_shared = len({sequence.team for sequence in plan.decoding}) > 1
        if self._model is not None and offers:
            self._before_s = self._model.extend(offers, num_calls, max_rows=self._max_rows, is_shared=is_shared)
        offers = [one for one in map(_within, offers) if one.chances]
        if not offers:
            return None
        chances = [one.chances for one in offers]
        counts = self._costs.choose(chances, num_calls, max_rows=self._max_rows, is_shared=is_shared)
        if not any(counts) or not has_room(num_calls + sum(counts)):
            return None
        wanted = {
            id(one.sequence): count if count >= one.sequence.request.asked.speculation.n_min else 0
            for one, count in zip(offers, counts, strict=True)
        }
        drafted = Plan([_drafted(one.sequence, wanted.get(id(one.sequence), 0)) for one in plan.decode], [])
        return drafted if drafted.has_drafts else None

    def note_plain(self, num_calls: int, seconds: float) -> None:
        """Record a step without prompts and drafts."""
        self._waited_s += seconds
        self._costs.note_plain(num_calls, seconds - self._before_s)
        self._costs.note_lost(self._take_before_s())

    def note_drafted(self, plan: Plan[Sequence], num_tokens: int, seconds: float) -> None:
        """Record a step with drafts, which brought `num_tokens` tokens."""
        self._waited_s += seconds
        before_s = self._take_before_s()
        self._costs.note_drafted(len(plan.decode), plan.num_tokens, num_tokens, seconds - before_s, before_s)

    def note_verified(self, one: Decode[Sequence], num_accepted: int) -> None:
        """Record how many tokens of a draft were drawn."""
        drafts = one.sequence.drafts
        assert drafts is not None  # noqa: S101 - for the type checker
        self.num_drafts += 1
        drafts.num_drafted += len(one.draft)
        drafts.num_accepted += num_accepted
        if drafts.source is Source.PREDICTION:
            drafts.num_of_prediction += len(one.draft)
            drafts.num_foretold += num_accepted
        self.num_drafted[drafts.source] += len(one.draft)
        self.num_accepted[drafts.source] += num_accepted

    def check(self) -> None:
        """Check the draft model's records. Raises IntegrityError."""
        if self._model is not None:
            self._model.model.check(self._memory.last_position, self._model.most_ahead)

    def _take_before_s(self) -> float:
        before_s, self._before_s = self._before_s, 0.0
        return before_s

    def _offers(self, plan: Plan[Sequence], num_calls: int) -> list[Offer]:
        """Return what can be drafted for each call without a draft model; where there is one, also for those for which
        that is nothing."""
        offers = []
        until = time.perf_counter() + MAX_LOOK_S
        for sequence in plan.decoding:
            if time.perf_counter() > until:
                break
            drafts = sequence.drafts
            if drafts is None or (most := self._most(sequence, is_alone=num_calls == 1)) <= 0:
                continue
            offer = Offer(sequence, drafts, most, drafts.chances()[:most])
            if offer.chances or self._model is not None:
                offers.append(offer)
        return offers

    def _most(self, sequence: Sequence, *, is_alone: bool) -> int:
        """Return how many tokens may be drafted for a call now."""
        asked = sequence.request.asked.speculation
        most = min(sequence.limit - sequence.num_predicted, self._n_ctx - sequence.num_cells) - 1
        most = min(most, self._most_drafted)
        if asked.n_max >= 0:
            most = min(most, asked.n_max)
        if not sequence.cost.is_quick:  # others do not wait for more than one of its draws
            most = min(most, int(SHARE_S / sequence.cost.mean_s) - 1) if is_alone else 0
        return most


def _within(offer: Offer) -> Offer:
    """Return the offer as far as its caller wants drafts."""
    asked = offer.sequence.request.asked.speculation
    if asked.p_min:
        offer.chances = [chance for chance in offer.chances if chance >= asked.p_min]
    if len(offer.chances) < asked.n_min:
        offer.chances = ()
    return offer


def _drafted(sequence: Sequence, count: int) -> Decode[Sequence]:
    if not count or sequence.drafts is None:
        return Decode(sequence)
    return Decode(sequence, tuple(sequence.drafts.take(count)))
