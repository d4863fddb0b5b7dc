"""What of a wait is the host's: spans of pauses and of waits laid over each other."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.security.host import Pauses, watched_host


@pytest.mark.parametrize(
    ("span", "left"),
    [
        ((0.0, 1.0), 1.0),
        ((0.0, 2.5), 2.0),
        ((2.5, 2.75), 0.0),
        ((2.5, 7.0), 1.5),
        ((0.0, 10.0), 6.5),
        ((8.0, 9.0), 1.0),
    ],
)
def test_the_hosts_part_of_a_wait(span: tuple[float, float], left: float) -> None:
    pauses = Pauses([(5.0, 6.0), (2.0, 3.0), (2.5, 4.0), (6.0, 6.5)])
    assert pauses.spans == [(2.0, 4.0), (5.0, 6.5)]
    assert pauses.length_without(span) == left


def test_as_if_every_moment_were_looked_at() -> None:
    chance = random.Random(3)
    for _ in range(200):
        spans = [(begin, begin + chance.randrange(9)) for begin in chance.choices(range(100), k=8)]
        begin = chance.randrange(90)
        end = begin + chance.randrange(1, 40)
        paused = {moment for since, until in spans for moment in range(since, until)}
        free = sum(moment not in paused for moment in range(begin, end))
        assert Pauses(spans).length_without((begin, end)) == free


async def test_the_host_of_this_machine_is_watched() -> None:
    async with watched_host() as spans:
        await asyncio.sleep(0.5)
    assert all(0 < end - begin < 60 for begin, end in spans)
