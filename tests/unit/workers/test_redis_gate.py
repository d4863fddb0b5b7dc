"""When a Redis that can't be reached is tried again."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError

from workers.redis import trouble
from workers.redis.trouble import Gate


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trouble, "time", clock)
    return clock


def closed_for(gate: Gate, clock: Clock) -> float:
    """How long nothing gets through, to the millisecond."""
    began = clock.now
    while True:
        try:
            gate.enter()
            return clock.now - began
        except ConnectionError:
            clock.now += 0.001


def test_it_stays_open_while_all_is_well(clock: Clock) -> None:
    gate = Gate()
    for _ in range(3):
        gate.enter()
        gate.passed()


def test_it_closes_for_longer_after_each_failure_and_never_equally_long(clock: Clock) -> None:
    waits = []
    for _ in range(20):
        gate = Gate(first_s=0.1, longest_s=2.0)
        times = []
        for _ in range(8):
            gate.failed("refused")
            times.append(closed_for(gate, clock))
        waits.append(times)
    for times in waits:
        for n, waited in enumerate(times):
            most = min(2.0, 0.1 * 2 ** (n + 1))
            assert most / 2 - 0.001 <= waited <= most + 0.001
    assert len({round(times[-1], 3) for times in waits}) > 10


def test_after_a_failure_one_is_let_through_at_a_time(clock: Clock) -> None:
    gate = Gate()
    gate.failed("refused by the host")
    clock.now += 10
    gate.enter()
    with pytest.raises(ConnectionError, match="not tried again yet: refused by the host"):
        gate.enter()
    gate.passed()
    gate.enter()
    gate.enter()
