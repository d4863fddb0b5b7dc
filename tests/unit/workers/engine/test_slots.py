from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.slots import IntegrityError, SlotBook


def test_a_place_needs_a_slot_and_all_its_cells() -> None:
    book = SlotBook(slots=2, kv_tokens=100)
    assert book.enter(60) == 0
    assert book.enter(60) is None
    assert book.enter(40) == 1
    assert book.enter(0) is None
    assert (book.num_busy, book.num_reserved) == (2, 100)
    book.leave(0)
    assert book.enter(60) == 0


@given(st.lists(st.one_of(st.integers(0, 60), st.just(-1)), max_size=60))
def test_the_book_always_adds_up(acts: list[int]) -> None:
    book, held = SlotBook(slots=4, kv_tokens=100), dict[int, int]()
    for act in acts:
        if act >= 0:
            slot = book.enter(act)
            assert (slot is None) == (len(held) == 4 or sum(held.values()) + act > 100)
            if slot is not None:
                assert slot not in held
                held[slot] = act
        elif held:
            book.leave(slot := min(held))
            del held[slot]
        book.check()
        assert (book.num_busy, book.num_reserved) == (len(held), sum(held.values()))


def test_a_wrong_sum_is_found() -> None:
    book = SlotBook(slots=2, kv_tokens=100)
    book.enter(10)
    book.num_reserved = 11
    with pytest.raises(IntegrityError, match="11 of 100 cells"):
        book.check()
