"""What an answer is drafted from, without a model."""

from __future__ import annotations

import numpy as np

from workers.engine.cache.prompt import Scope
from workers.engine.speculation.drafts import Drafts
from workers.engine.speculation.hit_rates import FIRST_GUESSES, HitRates, Source
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
    first = pools.of(Scope("first"))
    second = pools.of(Scope("second"))
    for number in range(MAX_SCOPES - 1):
        pools.of(Scope(f"team-{number}"))
        assert pools.of(Scope("first")) is first
    assert pools.of(Scope("second")) is not second
