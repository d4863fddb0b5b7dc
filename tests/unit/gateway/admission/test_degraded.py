"""What a gateway remembers while Redis is away."""

from __future__ import annotations

from gateway.admission.degraded import MOST_ENDED, DegradedPlacement, GatewayRing
from gateway.admission.local_queue import LocalQueue
from gateway.registry.fleet import Fleet
from gateway.store.client import connect


def test_calls_that_ended_long_ago_are_not_told_to_redis() -> None:
    """After hours they would be so many that Redis could not take them in time, and never be asked again."""
    fleet = Fleet(connect("redis://localhost:1"), "secret")
    degraded = DegradedPlacement(LocalQueue(), fleet, GatewayRing("g", 2.0, 1.5), max_queue=1, max_team_queue=1)
    for number in range(MOST_ENDED + 5):
        degraded.note_ended("m", str(number))
    told = degraded.take_ended("m")
    assert (len(told), told[-1]) == (MOST_ENDED, str(MOST_ENDED + 4))
    assert degraded.take_ended("m") == []
