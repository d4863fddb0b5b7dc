"""The index of tokens, against a search through all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.speculation.token_index import MAX_MATCH, MIN_MATCH, Match, TokenIndex

few = st.lists(st.integers(0, 3), max_size=60)


def index_of(tokens: Sequence[int], pushed: Sequence[int] = ()) -> TokenIndex:
    index = TokenIndex(np.array(tokens, np.int32), len(pushed))
    for token in pushed:
        index.push(token)
    return index


def longest(tokens: Sequence[int], recent: Sequence[int], ends: range) -> Match | None:
    """Return what the index should find, among places that end at `ends`, by comparing all of them."""
    best = None
    for end in ends:
        length = 0
        while length < min(end, len(recent), MAX_MATCH) and tokens[end - 1 - length] == recent[-1 - length]:
            length += 1
        if length >= MIN_MATCH and (best is None or length >= best.length):
            best = Match(end, length)
    return best


@given(few, few)
def test_tokens_at_the_start_and_pushed_ones_make_the_same_index(first: list[int], pushed: list[int]) -> None:
    together, one_by_one = index_of([*first, *pushed]), index_of(first, pushed)
    assert together.tokens == one_by_one.tokens
    assert together.repeats() == one_by_one.repeats()
    assert together.find(first) == one_by_one.find(first)


@given(few, few, few)
def test_tokens_that_are_added_at_once_make_the_same_index(first: list[int], more: list[int], last: list[int]) -> None:
    at_once, one_by_one = index_of(first), index_of(first, more)
    at_once.extend(more)
    for token in last:
        at_once.push(token)
        one_by_one.push(token)
    assert at_once.tokens == one_by_one.tokens
    assert at_once.repeats() == one_by_one.repeats()
    assert at_once.find(last) == one_by_one.find(last)


@given(few)
def test_the_match_is_the_longest_of_the_latest_places(tokens: list[int]) -> None:
    found = index_of(tokens[:10], tokens[10:]).repeats()
    expected = longest(tokens, tokens, range(MIN_MATCH, len(tokens)))
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.length <= expected.length
        assert tokens[found.follow - found.length : found.follow] == tokens[len(tokens) - found.length :]
        num_places = sum(tokens[end - 3 : end] == tokens[-3:] for end in range(MIN_MATCH, len(tokens)))
        if num_places <= 8:
            assert found == expected


@given(few, few)
def test_another_text_is_found_by_its_end(tokens: list[int], recent: list[int]) -> None:
    found = index_of(tokens).find(recent)
    expected = longest(tokens, recent, range(MIN_MATCH, len(tokens) + 1))
    assert (found is None) == (expected is None)
    if found is not None:
        assert tokens[found.follow - found.length : found.follow] == recent[len(recent) - found.length :]


def test_large_token_numbers_are_told_apart() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 262_144, 20_000, dtype=np.int32)
    index = TokenIndex(tokens, 0)
    for at in rng.integers(MIN_MATCH, len(tokens) - 1, 200):
        assert index.find(tokens[: at + 1].tolist()) == Match(at + 1, MAX_MATCH if at >= MAX_MATCH else at + 1)
