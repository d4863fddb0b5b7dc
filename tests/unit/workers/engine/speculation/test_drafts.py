"""What an answer is drafted from, without a model."""

from __future__ import annotations

import numpy as np

from workers.engine.cache.prompt import Scope
from workers.engine.speculation.drafts import MAX_UNREAD, Drafts
from workers.engine.speculation.hit_rates import FIRST_GUESSES, FIRST_MODEL_RATE, HitRates, Source, length_of
from workers.engine.speculation.pools import GENERATION_TOKENS, MAX_SCOPES, NO_TOKEN, Pool, Pools
from workers.engine.speculation.token_index import MAX_MATCH


def drafts_of(prompt: list[int], *, prediction: tuple[int, ...] = (), rates: HitRates | None = None) -> Drafts:
    return Drafts(np.array(prompt, np.int32), rates or HitRates(), room=100, is_greedy=True, prediction=prediction)


def draft(drafts: Drafts, count: int = 8) -> list[int]:
    return drafts.take(count) if drafts.chances() else []


def test_what_followed_the_same_tokens_is_drafted() -> None:
    drafts = drafts_of([1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4])
    assert draft(drafts, 4) == [5, 6, 7, 9]
    drafts.push(5)
    assert draft(drafts, 2) == [6, 7]
    drafts.push(8)
    assert draft(drafts) == []


def test_a_repetition_is_drafted_beyond_its_end() -> None:
    drafts = drafts_of([1, 2, 3, 1, 2, 3])
    assert draft(drafts, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_the_longest_match_leads() -> None:
    drafts = drafts_of([9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3])
    assert draft(drafts, 1) == [50]


def test_a_prediction_is_followed_from_its_start_and_found_again() -> None:
    drafts = drafts_of([100, 101], prediction=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert draft(drafts, 3) == [1, 2, 3]
    for token in (1, 2, 77, 4, 5, 6):
        drafts.push(token)
    assert draft(drafts) == [7, 8, 9]
    assert len(drafts.chances()) == 3, "no more than are left"
    for token in (7, 8, 9, 10):
        drafts.push(token)
    assert draft(drafts) == []


def test_an_earlier_answer_ends_where_it_ended() -> None:
    pool = Pool()
    pool.add([1, 2, 3, 4, 5])
    pool.add([7, 8, 9, 10])
    drafts = drafts_of([1, 2, 3])
    drafts.share(pool)
    assert draft(drafts) == [4, 5]
    assert len(drafts.chances()) == 2
    drafts.push(4)
    drafts.push(5)
    assert draft(drafts) == [], "the next answer is another"


def test_rates_are_learned_from_drafts_that_are_not_computed() -> None:
    rates = HitRates()
    drafts = drafts_of([1, 2, 3, 4] * 8, rates=rates)
    first = rates.chances(True, Source.HISTORY, MAX_MATCH)[0]
    assert first == FIRST_GUESSES[-1]
    drafts.chances()
    for _ in range(20):
        for token in (1, 2, 3, 4):
            drafts.push(token)
        drafts.chances()
    assert rates.chances(True, Source.HISTORY, MAX_MATCH)[0] > first
    assert rates.chances(False, Source.HISTORY, MAX_MATCH)[0] == first


def test_a_pool_forgets_its_older_half() -> None:
    pool = Pool()
    pool.add([1, 2, 3, 4])
    for number in range(3 * GENERATION_TOKENS // 1_000):
        pool.add([10_000 + number] * 1_000)
    assert len(pool.generations) == 2
    assert sum(len(generation.tokens) for generation in pool.generations) < 2.5 * GENERATION_TOKENS
    assert all(generation.find([1, 2, 3]) is None for generation in pool.generations)
    assert NO_TOKEN in pool.generations[0].tokens


def test_the_pool_used_longest_ago_is_forgotten() -> None:
    pools = Pools()
    for number in range(MAX_SCOPES):
        pools.add(Scope(f"team-{number}"), [1, 2, 3, 4])
    assert pools.find(Scope("team-0")) is not None
    pools.add(Scope("new"), [1, 2, 3, 4])
    assert pools.find(Scope("team-0")) is not None
    assert pools.find(Scope("team-1")) is None


def test_a_team_with_many_salts_displaces_its_own_pools() -> None:
    pools = Pools()
    pools.add(Scope("quiet"), [1, 2, 3, 4])
    for number in range(3 * MAX_SCOPES):
        pools.add(Scope("loud", salt=str(number)), [1, 2, 3, 4])
    assert pools.find(Scope("quiet")) is not None
    assert pools.find(Scope("loud", salt="0")) is None


def test_many_unread_tokens_are_entered_without_following_them() -> None:
    one_by_one, at_once = drafts_of([1, 2, 3] * 4), drafts_of([1, 2, 3] * 4)
    one_by_one.chances()
    at_once.chances()
    tokens = [5, 6, 7, 8, 9] * (MAX_UNREAD // 4)
    for token in tokens:
        one_by_one.push(token)
        one_by_one.chances()
        at_once.push(token)
    assert draft(at_once) == draft(one_by_one) == [5, 6, 7, 8, 9, 5, 6, 7]
    assert at_once.newest(5) == tokens[-5:]


def test_a_draft_models_tokens_are_followed_as_far_as_they_are_drawn() -> None:
    rates = HitRates()
    drafts = drafts_of([1, 2, 3], rates=rates)
    drafts.follow([4, 5, 6], [0.999, 0.85, 0.2])
    chances = drafts.chances()
    assert len(chances) == 3
    assert chances[0] == rates.chance(True, Source.MODEL, length_of(0.999)) > 0.9
    assert chances[2] < 0.4
    assert drafts.take(2) == [4, 5]
    assert drafts.source is Source.MODEL
    for token in (4, 5):
        drafts.push(token)
    assert draft(drafts) == [6], "what a step had no rows for serves the next one"
    drafts.push(6)
    drafts.push(7)
    assert draft(drafts) == []
    assert drafts.model_rate > FIRST_MODEL_RATE, "where its text ended it was not mistaken"
    assert rates.model_rates[True] > FIRST_MODEL_RATE == rates.model_rates[False]
    drafts.follow([8, 9], [0.5, 0.5])
    drafts.push(1)
    assert draft(drafts) == []


def test_how_sure_a_draft_model_was_is_told_apart() -> None:
    rates = HitRates()
    for number in range(400):
        rates.note(True, Source.MODEL, length_of(0.96), is_hit=True)
        rates.note(True, Source.MODEL, length_of(0.6), is_hit=number % 2 == 0)
    assert rates.chance(True, Source.MODEL, length_of(0.97)) > 0.95
    assert 0.4 < rates.chance(True, Source.MODEL, length_of(0.55)) < 0.6
    assert len({length_of(probability / 100) for probability in range(101)}) == len(FIRST_GUESSES)


def test_without_text_that_stood_before_nothing_is_searched() -> None:
    drafts = Drafts(np.array([1, 2, 3] * 5, np.int32), HitRates(), room=10, is_greedy=True, searches=False)
    assert draft(drafts) == []
