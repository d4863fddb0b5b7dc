"""Which workers a call can do nothing with, and how slots are numbered over workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.routing.fit import unfit
from gateway.routing.slot_numbers import ANY, firsts, located, number_of
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import Heartbeat


def worker(name: str, *adapters: str, slots: int = 2, draining: bool = False) -> Heartbeat:
    return replace(heartbeat(name, slots=slots), adapters=adapters, draining=draining)


POOL = [worker("a"), worker("b", "pirate"), worker("c", "pirate", "poet")]
NONE: frozenset[str] = frozenset()


def test_a_call_that_needs_nothing_fits_everywhere() -> None:
    assert unfit(POOL, NONE, NONE) == NONE


def test_workers_without_an_adapter_are_left_out_while_another_has_it() -> None:
    assert unfit(POOL, NONE, frozenset({"pirate"})) == {"a"}
    assert unfit(POOL, NONE, frozenset({"pirate", "poet"})) == {"a", "b"}
    assert unfit(POOL, frozenset({"c"}), frozenset({"poet"})) == NONE
    assert unfit(POOL, NONE, frozenset({"unheard"})) == NONE


def test_a_slot_is_waited_for_at_its_own_worker() -> None:
    assert unfit(POOL, NONE, NONE, slot=3) == {"a", "c"}
    assert unfit(POOL, frozenset({"b"}), NONE, slot=3) == {"b"}
    assert unfit(POOL, NONE, NONE, slot=6) == NONE


def test_nobody_waits_for_a_slot_of_a_worker_that_leaves_or_lacks_the_adapter() -> None:
    leaving = [worker("a"), worker("b", draining=True)]
    assert unfit(leaving, NONE, NONE, slot=2) == {"b"}
    assert unfit(POOL, NONE, frozenset({"poet"}), slot=0) == {"a", "b"}


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(-2, 60))
def test_a_number_leads_to_the_slot_that_has_it(sizes: list[int], number: int) -> None:
    pool = [worker(f"w{n}", slots=slots) for n, slots in enumerate(sizes)]
    place = located(number, pool)
    assert (place is not None) == (0 <= number < sum(sizes))
    if place is not None:
        assert 0 <= place[1] < place[0].slots
        assert number_of(place[0].worker, place[1], pool) == number


def test_the_first_slots_of_workers() -> None:
    assert firsts([]) == []
    assert firsts([worker("a", slots=3), worker("b", slots=2)]) == [0, 3]
    assert number_of("gone", 0, POOL) == ANY
