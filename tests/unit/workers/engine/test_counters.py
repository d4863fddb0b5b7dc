"""Counting on the engine's thread: gaps between tokens, and where prompts came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from workers.engine.counters import Distribution, PromptSources, PromptTally, Tally, TokenGaps
from workers.engine.step.sequence import Sequence
from workers.metrics.types import GAP_S


@dataclass
class Call:
    """What is counted of a sequence."""

    token_at: float = 0.0
    num_prompt: int = 100
    num_cached: int = 0
    num_restored: int = 0
    num_fetched: int = 0
    cache_prompt: bool = True

    @property
    def sequence(self) -> Sequence:
        return cast(Sequence, self)


def counted(distribution: Distribution) -> dict[float, int]:
    """Bound -> values in its bucket, where there are any."""
    bounds = (*distribution.bounds, float("inf"))
    return {bound: count for bound, count in zip(bounds, distribution.counts, strict=True) if count}


def test_a_value_falls_under_the_first_bound_that_is_not_below_it() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        tally.add(value)
    tally.add(2.0, 10)
    assert tally.distribution == Distribution((1.0, 2.0), (2, 11, 1), 26.0)


def test_gaps_are_each_calls_own() -> None:
    gaps = TokenGaps()
    calls = [Call(token_at=10.0), Call(token_at=10.0), Call(token_at=9.0), Call(token_at=10.0)]
    gaps.note([call.sequence for call in calls], 10.03)
    assert counted(gaps.tally.distribution) == {0.05: 3, 2.5: 1}
    assert [call.token_at for call in calls] == [10.03] * 4
    gaps.note([call.sequence for call in calls[:2]], 10.22)
    gaps.note([calls[2].sequence], 10.41)
    assert counted(gaps.tally.distribution) == {0.05: 3, 0.2: 2, 0.4: 1, 2.5: 1}
    assert gaps.tally.distribution.total == pytest.approx(3 * 0.03 + 1.03 + 2 * 0.19 + 0.38)


def test_a_step_of_nobody_counts_nothing() -> None:
    gaps = TokenGaps()
    gaps.note([], 5.0)
    assert gaps.tally.distribution == Distribution(GAP_S, (0,) * (len(GAP_S) + 1), 0.0)


@pytest.mark.parametrize(
    ("cached", "restored", "fetched", "expected"),
    [
        (0, 0, 0, PromptSources(100, 0, 0, 0)),
        (90, 0, 0, PromptSources(10, 90, 0, 0)),
        (90, 60, 0, PromptSources(10, 30, 60, 0)),
        (90, 60, 40, PromptSources(10, 30, 20, 40)),
        # Fetched, and gone from RAM before it could be restored.
        (30, 0, 40, PromptSources(70, 30, 0, 0)),
        # Thrown out before it began: brought back twice, counted once.
        (90, 150, 40, PromptSources(10, 0, 50, 40)),
    ],
)
def test_each_prompt_token_has_one_source(cached: int, restored: int, fetched: int, expected: PromptSources) -> None:
    prompts = PromptTally()
    prompts.note(Call(num_cached=cached, num_restored=restored, num_fetched=fetched).sequence)
    assert prompts.sources == expected
    assert prompts.num_queried == 100


def test_calls_that_may_not_use_the_cache_do_not_ask_it() -> None:
    prompts = PromptTally()
    prompts.note(Call(cache_prompt=False).sequence)
    assert prompts.num_queried == 0
    assert prompts.sources.computed == 100
