"""The index of heads, against the plain table that it stands for."""

from __future__ import annotations

import random

import pytest

from gateway.routing.prefix_hashes import FEW, PrefixHashIndex


def numbers(index: PrefixHashIndex, prefix_hash: int) -> set[int]:
    holders = index.holders(prefix_hash)
    return {holders} if isinstance(holders, int) else set(holders)


@pytest.mark.parametrize("seed", range(5))
def test_it_knows_who_has_what(seed: int) -> None:
    """Workers come, learn, forget and go; some heads are everybody's, and workers say things twice."""
    source = random.Random(seed)
    hashes = [source.getrandbits(64) for _ in range(60)]
    index, truth = PrefixHashIndex(), {number: set[int]() for number in range(3 * FEW)}
    for _ in range(1500):
        number = source.randrange(3 * FEW)
        some = source.choices(hashes, k=source.randrange(30))
        match source.choice(["add", "add", "add", "drop", "drop", "forget"] if number else ["add"]):
            case "add":
                index.add(number, some)
                truth[number].update(some)
            case "drop":
                index.drop(number, some)
                truth[number].difference_update(some)
            case _:
                if source.random() < 0.2:
                    index.forget(number)
                    truth[number].clear()
    for prefix_hash in hashes:
        assert numbers(index, prefix_hash) == {number for number, has in truth.items() if prefix_hash in has}
    for number, has in truth.items():
        assert index.count(number) == len(has)


def test_nothing_stays_of_those_who_are_gone() -> None:
    index = PrefixHashIndex()
    for number in range(20):
        index.add(number, range(1 << 63, (1 << 63) + 500))
    for number in range(20):
        index.forget(number)
    assert all(index.holders(prefix_hash) == () for prefix_hash in range(1 << 63, (1 << 63) + 500))
    assert not any(index._shards)
    assert not index._logs


def test_what_comes_and_goes_again_and_again_takes_no_more_room() -> None:
    index = PrefixHashIndex()
    index.add(0, range(100))
    for round in range(1000):
        index.drop(0, [round % 100])
        index.add(0, [round % 100])
    assert index.count(0) == 100
    assert len(index._logs[0]) < 400


def test_levels_of_a_prompt_are_where_more_have_it() -> None:
    """Deepest first; heads that as many have as the one behind them are not told."""
    index, prompt = PrefixHashIndex(), [source * 10**17 for source in range(1, 65)]
    for number, depth in enumerate([64, 64, 40, 39, 20, 20, 3]):
        index.add(number, prompt[:depth])
    told = [(place, {holders} if isinstance(holders, int) else set(holders)) for place, holders in index.levels(prompt)]
    assert told == [
        (63, {0, 1}),
        (39, {0, 1, 2}),
        (38, {0, 1, 2, 3}),
        (19, {0, 1, 2, 3, 4, 5}),
        (2, {0, 1, 2, 3, 4, 5, 6}),
    ]
    assert index.levels([5, 6, 7]) == index.levels([]) == []
    assert index.levels(prompt[:1]) == [(0, tuple(range(7)))]
