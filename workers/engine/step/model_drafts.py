"""Decides for which answers the draft model guesses, and how far: as far as that probably saves more than it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from operator import mul

from workers.engine.pace import MOVE_S, AnswerLengths
from workers.engine.speculation.draft_model import DraftModel, Wanted
from workers.engine.speculation.drafts import Drafts
from workers.engine.speculation.hit_rates import HitRates, Source, length_of
from workers.engine.speculation.step_costs import MAX_DRAFTED, RoundCosts, StepCosts
from workers.engine.step.sequence import Sequence
from workers.models.generation import DraftSpec

READY_TOKENS = 32
"""Number of unread tokens of a conversation up to which they are read beside its first guessed token. So many are read
at once in any case: no micro-batch is smaller."""

FORGET = 0.002
"""Share of the way back to what other answers bring, and of all answers' to the first guess, by which rates move with
each step for which a draft does not seem to pay: so drafts are tried again."""

FIRST_SHARE = 1.0
"""Assumed ratio of the draft model's time for a token to the engine's, as a multiple of the ratio of parameters."""


@dataclass(slots=True)
class Offer:
    """The tokens that may be drafted for a call in a step."""

    sequence: Sequence
    drafts: Drafts
    most: int
    """Maximum number of tokens that may be drafted."""
    chances: Ordered[float]
    """For each token that can be drafted, the chance that it and all before it are drawn."""


def rounds_of(chances: Ordered[Ordered[float]], are_guessed: Ordered[bool]) -> list[int]:
    """Return, for 0, 1, 2, ... tokens that a step computes, likeliest first, how many rounds guessing them takes: as
    many as tokens of the longest draft. `chances`: of each draft, as in `StepCosts.choose`. `are_guessed`: whether it
    is the model's."""
    counts, rounds = [0] * len(chances), [0]
    ranked = ((chance, -number) for number, one in enumerate(chances) for chance in one)
    for _, number in nlargest(MAX_DRAFTED, ranked):
        counts[-number] += 1
        rounds.append(max(rounds[-1], counts[-number]) if are_guessed[-number] else rounds[-1])
    return rounds


class ModelDrafts:
    """The drafts of a draft model. Only the engine's thread uses it."""

    def __init__(
        self,
        model: DraftModel,
        spec: DraftSpec,
        costs: StepCosts,
        rates: HitRates,
        lengths: AnswerLengths,
        *,
        num_params: int,
    ) -> None:
        """`num_params`: those of the engine's model."""
        self.model = model
        self.most_ahead = spec.n_max
        self._spec = spec
        self._costs, self._rates, self._lengths = costs, rates, lengths
        self._share = FIRST_SHARE * model.num_params / max(num_params, 1)
        self._rounds = RoundCosts(lambda num_answers: self._share * costs.plain_s(num_answers))

    def extend(self, offers: Ordered[Offer], num_calls: int, *, max_rows: int, is_shared: bool) -> float:
        """Replace what is offered by the model's guesses where these probably save more. Return the seconds taken."""
        started = time.perf_counter()
        if not self.model.is_able or num_calls > MAX_DRAFTED:
            return 0.0
        expected = [self._expected(one) for one in offers]
        are_better = [sum(guessed) > sum(one.chances) for guessed, one in zip(expected, offers, strict=True)]
        num_asked = sum(are_better)
        if not num_asked:
            return 0.0
        chances = [max(guessed, one.chances, key=sum) for guessed, one in zip(expected, offers, strict=True)]
        rounds, round_s = rounds_of(chances, are_better), self._rounds.expected(num_asked)
        counts = self._costs.choose(
            chances,
            num_calls,
            max_rows=max_rows,
            is_shared=is_shared,
            before_s=lambda num_drafted: rounds[num_drafted] * round_s,
        )
        wanted = []
        for one, is_better, count in zip(offers, are_better, counts or [0] * len(offers), strict=True):
            if is_better and count:
                wanted.append((one, count))
            elif is_better:
                self._forget(one.drafts)
        self._guess(self._ready(wanted, num_calls), num_calls)
        return time.perf_counter() - started

    def _expected(self, offer: Offer) -> list[float]:
        """Return the chances of what the model would probably guess for a call."""
        if offer.sequence.request.prompt.spans:
            return []
        return list(accumulate([offer.drafts.model_rate] * min(offer.most, self._spec.n_max), mul))

    def _forget(self, drafts: Drafts) -> None:
        drafts.model_rate += (self._rates.model_rates[drafts.is_greedy] - drafts.model_rate) * FORGET
        self._rates.forget_some(drafts.is_greedy, FORGET)

    def _ready(self, wanted: list[tuple[Offer, int]], num_calls: int) -> list[tuple[Offer, int]]:
        """Return those whose tokens the model has read. Read a part of one of the others, if that pays; none is left if
        that fails, since the model forgets all conversations then."""
        ready = []
        reads, room = True, self._most_at_once(num_calls)
        for offer, count in wanted:
            known = offer.sequence.tokens()
            num_missing = self.model.num_missing(offer.sequence.id, known)
            if not self.model.can_read(offer.sequence.id, known):
                continue
            if num_missing <= READY_TOKENS:
                if num_missing <= room:
                    ready.append((offer, count))
                    room -= num_missing
            elif reads and self._is_worth_reading(offer, count, num_missing, num_calls):
                reads = False
                num_read = min(num_missing - 1, self._most_at_once(num_calls))
                if not self.model.read(offer.sequence.id, known, num_read):
                    return []
        return ready

    def _most_at_once(self, num_calls: int) -> int:
        """Return how many tokens the model may read at once: a micro-batch, or where other answers wait for it, those
        of `MOVE_S` seconds."""
        if num_calls == 1:
            return self.model.n_ubatch
        row_s = self._read_s
        return max(READY_TOKENS, min(self.model.n_ubatch, int(MOVE_S / row_s))) if row_s else READY_TOKENS

    @property
    def _read_s(self) -> float:
        """Return the seconds that reading a token takes, of many; 0: not known."""
        return self.model.row_s or self._share * self._costs.row_s

    def _is_worth_reading(self, offer: Offer, count: int, num_missing: int, num_calls: int) -> bool:
        sequence = offer.sequence
        num_gained = sum(self._expected(offer)[:count])
        saved_s = self._costs.saved_s(num_calls, count, num_gained, count * self._rounds.expected(1))
        return saved_s * self._lengths.left(sequence.num_predicted, sequence.limit) > num_missing * self._read_s

    def _guess(self, wanted: list[tuple[Offer, int]], num_calls: int) -> None:
        """Have the model guess, and offer what it says."""
        if not wanted:
            return
        token_s = self._rounds.expected(len(wanted)) / len(wanted)
        num_rows = num_calls + sum(count for _, count in wanted)
        least = self._costs.least_chance(num_calls, num_rows, token_s)
        asked = [self._wanted(offer, count, least) for offer, count in wanted]
        self.model.guess(asked, self._rounds)
        for (offer, _), one in zip(wanted, asked, strict=True):
            if one.tokens:
                offer.drafts.follow(one.tokens, one.probabilities)
                offer.chances = offer.drafts.chances()[: offer.most]

    def _wanted(self, offer: Offer, count: int, least: float) -> Wanted:
        is_greedy, rates = offer.drafts.is_greedy, self._rates
        return Wanted(
            offer.sequence.id,
            offer.sequence.tokens(),
            count,
            lambda probability: rates.chance(is_greedy, Source.MODEL, length_of(probability)),
            max(least, offer.sequence.request.asked.speculation.p_min),
        )
