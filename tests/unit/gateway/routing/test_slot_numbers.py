"""How slots are numbered over workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.placement import ANY, find_slot, first_slot_numbers, slot_number
from tests.support.pool import heartbeat as worker


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(-2, 60))
def test_a_number_leads_to_the_slot_that_has_it(sizes: list[int], number: int) -> None:
    pool = [worker(f"w{n}", slots=slots) for n, slots in enumerate(sizes)]
    place = find_slot(number, pool)
    assert (place is not None) == (0 <= number < sum(sizes))
    if place is not None:
        assert 0 <= place[1] < place[0].slots
        assert slot_number(place[0].worker, place[1], pool) == number


def test_the_first_slots_of_workers() -> None:
    assert first_slot_numbers([]) == []
    assert first_slot_numbers([worker("a", slots=3), worker("b", slots=2)]) == [0, 3]
    assert slot_number("gone", 0, [worker("a")]) == ANY
