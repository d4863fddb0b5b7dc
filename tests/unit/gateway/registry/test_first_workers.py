"""For how long a gateway waits for models that have no worker yet."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.registry.snapshot import FirstWorkers, FleetSnapshot
from tests.support.pool import heartbeat


def fleet(*models: str, draining: bool = False) -> FleetSnapshot:
    return FleetSnapshot({model: (replace(heartbeat("w", model=model), draining=draining),) for model in models})


def test_a_model_is_waited_for_until_a_worker_was_seen_and_never_again() -> None:
    first = FirstWorkers(frozenset({"a", "b"}), 10.0, lambda: 0.0)
    assert first.missing == {"a", "b"}
    first.follow(fleet("a", "guest"))
    assert first.missing == {"b"}
    first.follow(fleet("b", draining=True))
    assert first.missing == {"b"}, "it answers no more"
    first.follow(fleet("b"))
    first.follow(fleet())
    assert first.missing == frozenset()


def test_a_model_that_does_not_come_keeps_a_gateway_for_a_while_only() -> None:
    now = 5.0
    bounded = FirstWorkers(frozenset({"a"}), 10.0, lambda: now)
    unbounded = FirstWorkers(frozenset({"a"}), 0.0, lambda: now)
    now = 14.9
    assert bounded.missing == {"a"}
    now = 1e6
    assert bounded.missing == frozenset()
    assert unbounded.missing == {"a"}
