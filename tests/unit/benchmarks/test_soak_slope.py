"""The slope of a soak finds a leak under noise, and takes neither noise nor one large step for a leak."""

from __future__ import annotations

import random

import pytest

from benchmarks.soak.slope import MAX_BLOCKS, Point, blocks, slope_of
from benchmarks.soak.verdict import MEASURES

EVERY_S, LONG_S = 5.0, 1440.0
RSS = MEASURES["rss"]


def memory(seed: int, *, leak_per_hour: float = 0.0, wild: float = 0.0) -> list[Point]:
    """MiB over 24 minutes: noise of about 1 MiB that lasts for half a minute; a share of points 50 MiB off."""
    chance, noise = random.Random(seed), 0.0
    times = [number * EVERY_S for number in range(round(LONG_S / EVERY_S))]
    values = []
    for time_s in times:
        noise = 0.85 * noise + chance.gauss(0, 0.5)
        values.append(100 + noise + leak_per_hour * time_s / 3600 + 50 * (chance.random() < wild))
    return list(zip(times, values, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_flat(seed: int) -> None:
    slope = slope_of(memory(seed))
    assert slope is not None
    assert RSS.allows(slope)
    assert abs(slope.per_hour) < RSS.per_hour


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found(seed: int) -> None:
    slope = slope_of(memory(seed, leak_per_hour=20, wild=0.1))
    assert slope is not None
    assert not RSS.allows(slope)
    assert slope.low <= 20 + 3
    assert slope.high >= 20 - 3
    assert slope.span_s == pytest.approx(LONG_S, rel=0.05)


def test_what_shrinks_is_no_leak() -> None:
    slope = slope_of(memory(0, leak_per_hour=-40))
    assert slope is not None
    assert RSS.allows(slope)


def test_what_an_allocator_takes_once_in_a_short_soak_is_no_leak() -> None:
    times = [float(second) for second in range(60)]
    slope = slope_of(list(zip(times, [100.0] * 20 + [101.5] * 40, strict=True)))
    assert slope is not None
    assert RSS.allows(slope)
    steady = slope_of([(second, 100 + second / 10) for second in times])
    assert steady is not None
    assert not RSS.allows(steady)


def test_too_little_says_nothing() -> None:
    assert slope_of() is None
    assert slope_of([]) is None
    assert slope_of([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]) is None


def test_points_are_joined_in_order() -> None:
    joined = blocks([(3.0, 30.0), (1.0, 10.0), (2.0, 20.0)])
    assert joined == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    assert len(blocks(memory(0))) <= MAX_BLOCKS


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("leak_per_hour", [0.0, 20.0])
def test_a_step_between_two_stretches_is_neither_a_leak_nor_hides_one(seed: int, leak_per_hour: float) -> None:
    points = memory(seed, leak_per_hour=leak_per_hour)
    early, late = points[: len(points) // 2], points[len(points) // 2 :]
    stepped = [(time_s, value + 8) for time_s, value in late]
    whole, parts = slope_of([*early, *stepped]), slope_of(early, stepped)
    assert whole is not None
    assert parts is not None
    assert not RSS.allows(whole)
    assert RSS.allows(parts) == (leak_per_hour == 0)
    assert parts.per_hour == pytest.approx(leak_per_hour, abs=6)
    assert parts.span_s == pytest.approx(LONG_S, rel=0.1)
