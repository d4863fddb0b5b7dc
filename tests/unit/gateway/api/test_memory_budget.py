"""Who may hold how much of a gateway's memory."""

from __future__ import annotations

import pytest

from gateway.api.intake.memory_budget import MemoryBudget, Reservation
from gateway.back_pressure import retry_after
from gateway.call import Principal
from gateway.errors import HeldTooMuch, MemoryFull, TakesTooMuch

MIB = 1 << 20


def principal(team: str, key: str = "") -> Principal:
    return Principal(key or f"key of {team}", team, None, admin=False)


def holding(budget: MemoryBudget, team: str, num_bytes: int, key: str = "") -> Reservation:
    reservation = budget.reserve(principal(team, key))
    reservation.resize(num_bytes)
    return reservation


def test_a_team_may_hold_as_much_as_is_free_beside_it() -> None:
    budget = MemoryBudget(96 * MIB)
    held = [holding(budget, "red", 8 * MIB, f"key {n}") for n in range(6)]
    with pytest.raises(HeldTooMuch, match="this team that are under way would hold"):
        holding(budget, "red", MIB, "another key")
    other = [holding(budget, "blue", 8 * MIB, f"key {n}") for n in range(3)]
    with pytest.raises(HeldTooMuch):
        holding(budget, "blue", 8 * MIB, "another key")
    third = holding(budget, "green", 8 * MIB)
    for reservation in (*held, *other, third):
        reservation.close()
    assert budget.num_bytes == 0


def test_a_key_leaves_room_for_the_other_keys_of_its_team() -> None:
    budget = MemoryBudget(96 * MIB)
    holding(budget, "red", 36 * MIB, "one")
    with pytest.raises(HeldTooMuch, match="this key"):
        holding(budget, "red", MIB, "one")
    holding(budget, "red", 4 * MIB, "another")


def test_what_never_fits_is_told_so() -> None:
    budget = MemoryBudget(96 * MIB)
    with pytest.raises(TakesTooMuch, match=f"one key may hold {36 * MIB}"):
        holding(budget, "red", 36 * MIB + 1)
    grown = holding(budget, "red", 36 * MIB)
    with pytest.raises(TakesTooMuch, match=f"take {36 * MIB + 1} bytes"):
        grown.add(1)
    assert grown.num_bytes == 36 * MIB


def test_a_refused_request_holds_what_it_held() -> None:
    budget = MemoryBudget(96 * MIB)
    reservation = holding(budget, "red", 10 * MIB)
    with pytest.raises(TakesTooMuch):
        reservation.resize(90 * MIB)
    assert budget.num_bytes == reservation.num_bytes == 10 * MIB
    reservation.grow(5 * MIB)
    assert reservation.num_bytes == 10 * MIB
    reservation.resize(5 * MIB)
    assert budget.num_bytes == 5 * MIB


def test_all_together_are_bounded() -> None:
    budget = MemoryBudget(96 * MIB)
    for team in range(22):
        holding(budget, f"team {team}", 4 * MIB)
    with pytest.raises((HeldTooMuch, MemoryFull)) as refused:
        holding(budget, "one more", 6 * MIB)
    assert retry_after(refused.value)
    with pytest.raises(MemoryFull, match="Try again"):
        holding(budget, "one more", 10 * MIB)


def test_what_goes_on_without_its_connection_stays_counted() -> None:
    budget = MemoryBudget(96 * MIB)
    reservation = holding(budget, "red", MIB)
    with reservation.shared():
        reservation.close()
        assert budget.num_bytes == MIB
    assert budget.num_bytes == 0
    with reservation.shared():  # begun a little later
        assert budget.num_bytes == MIB
    assert budget.num_bytes == 0


def test_what_is_closed_counts_nothing_any_more() -> None:
    budget = MemoryBudget(96 * MIB)
    reservation = holding(budget, "red", 2 * MIB)
    reservation.close()
    reservation.resize(0)
    assert budget.num_bytes == 0, "it would be below 0 for good"
    reservation.add(MIB)
    assert budget.num_bytes == 0
    with reservation.shared():
        assert budget.num_bytes == MIB
    assert budget.num_bytes == 0
