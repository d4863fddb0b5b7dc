"""Which models a gateway knows: those of its catalog, and others as long as it sees workers of them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.registry.fleet_state import REMEMBERED_S, FleetState
from tests.support.pool import heartbeat

NAMED = frozenset({"old", "other"})
"""Redis forgets no name."""


def read(state: FleetState, served: Iterable[str], now: float, *, draining: bool = False) -> frozenset[str]:
    """Read the workers of these models; return the models that are known."""
    beats = {(model, "w"): heartbeat("w", model=model, draining=draining) for model in served}
    state.replace_records(NAMED | {*served}, beats, now)
    return state.snapshot.models


def test_without_a_catalog_all_that_redis_names_are_known() -> None:
    state = FleetState(dict)
    assert read(state, (), 0.0) == NAMED
    state.limit(None, frozenset())
    assert read(state, (), 2 * REMEMBERED_S) == NAMED


def test_with_a_catalog_others_are_known_by_their_workers() -> None:
    state = FleetState(dict)
    state.limit(frozenset({"other"}), frozenset())
    assert read(state, (), 0.0) == {"other"}
    assert read(state, ["old"], 1.0) == NAMED
    assert read(state, (), REMEMBERED_S) == NAMED, "its worker may come back"
    assert read(state, (), 2.0 + REMEMBERED_S) == {"other"}


def test_a_model_that_has_left_the_catalog_is_known_while_a_worker_takes_calls() -> None:
    state = FleetState(dict)
    state.limit(frozenset({"other"}), frozenset({"old"}))
    assert read(state, ["old"], 1.0) == NAMED
    assert read(state, ["old"], 2.0, draining=True) == {"other"}
    state.limit(NAMED, frozenset())
    assert read(state, (), 3.0) == NAMED
