"""How far a draft model guesses beside the answers of others, on a made-up machine whose rounds take known times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workers.engine.pace import AnswerLengths
from workers.engine.speculation.hit_rates import HitRates
from workers.engine.speculation.step_costs import MAX_BESIDE_TEAMS, MAX_CREDIT_S, StepCosts
from workers.engine.step.model_drafts import READY_TOKENS, ModelDrafts, Offer, rounds_of
from workers.models.generation import DraftSpec
from workers.protocol.requests import Speculation

STEP_S, ROW_S, ROUND_S = 0.03, 1e-5, 0.0015


class QuickModel:
    """A draft model that has read everything, and notes what it is to guess."""

    is_able, num_params, n_ubatch, row_s = True, 1, 512, 1e-6

    def __init__(self) -> None:
        self.asked: list[int] = []

    def num_missing(self, sequence: int, known: Any) -> int:
        return 1

    def can_read(self, sequence: int, known: Any) -> bool:
        return True

    def guess(self, asked: list[Any], costs: Any) -> None:
        self.asked = [one.most for one in asked]


def offered(number: int, rate: float) -> Offer:
    """Return an offer of a call whose next tokens the model knows with the chance `rate` each."""
    asked = SimpleNamespace(speculation=Speculation())
    request = SimpleNamespace(prompt=SimpleNamespace(spans=()), asked=asked)
    tokens = np.arange(20, dtype=np.int32)
    sequence: Any = SimpleNamespace(id=number, request=request, tokens=lambda: tokens)
    drafts: Any = SimpleNamespace(model_rate=rate, is_greedy=True)
    return Offer(sequence, drafts, 16, ())


def test_the_longest_draft_says_how_many_rounds_it_takes() -> None:
    chances = [[0.3, 0.1], [0.9, 0.8, 0.7, 0.2], [0.85, 0.75]]
    assert rounds_of(chances, [True, True, True]) == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert rounds_of(chances, [True, False, True]) == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert len(rounds_of([[0.5] * 32] * 4, [True] * 4)) == 33


@pytest.mark.parametrize("sure", [0.99, 0.9])
def test_a_step_of_other_teams_waits_no_longer_for_one_long_draft(sure: float) -> None:
    """All calls but one are unsure, so that nearly all tokens are of this one: a round for each."""
    costs = StepCosts(credit_s=MAX_CREDIT_S)
    for _ in range(100):
        costs.note_plain(8, STEP_S)
    for num_rows in (12, 16, 20, 24):
        costs.note_drafted(8, num_rows, num_rows, STEP_S + ROW_S * num_rows)
    model: Any = QuickModel()
    drafts = ModelDrafts(model, DraftSpec(path="d"), costs, HitRates(), AnswerLengths(), num_params=100)
    for num_answers in range(1, 9):
        drafts._rounds.note(num_answers, ROUND_S)
    offers = [offered(number, sure if number == 3 else 0.1) for number in range(8)]
    drafts.extend(offers, 8, max_rows=512, is_shared=True)
    assert model.asked
    assert STEP_S + max(model.asked) * ROUND_S <= MAX_BESIDE_TEAMS * STEP_S


def test_nothing_is_guessed_in_a_step_in_which_the_model_forgot_all() -> None:
    """The first call's tokens were read before, by the book of a moment ago; the second one's take a cell too many."""
    costs = StepCosts(credit_s=MAX_CREDIT_S)
    for _ in range(100):
        costs.note_plain(2, STEP_S)
    for num_rows in (12, 16, 20, 24):
        costs.note_drafted(2, num_rows, num_rows, STEP_S + ROW_S * num_rows)

    class Forgetful(QuickModel):
        has_read = False

        def num_missing(self, sequence: int, known: Any) -> int:
            return 1 if sequence == 0 else READY_TOKENS + 1

        def read(self, sequence: int, known: Any, num_tokens: int) -> bool:
            self.has_read = True
            return False

    model: Any = Forgetful()
    drafts = ModelDrafts(model, DraftSpec(path="d"), costs, HitRates(), AnswerLengths(), num_params=100)
    drafts._rounds.note(1, ROUND_S)
    offers = [offered(number, 0.99) for number in range(2)]
    for one in offers:
        one.sequence.num_predicted, one.sequence.limit = 0, 1000
    drafts.extend(offers, 2, max_rows=512, is_shared=False)
    assert model.has_read
    assert not model.asked
