"""Shares of the slots: an exact partition, evenly, for those who are known to the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.degraded import GatewayRing, SlotShare


@given(st.integers(1, 40), st.integers(0, 64), st.text(max_size=12))
def test_every_slot_is_one_gateways(num_gateways: int, slots: int, worker: str) -> None:
    shares = [SlotShare(number, num_gateways).slots_of(worker, slots) for number in range(num_gateways)]
    assert sum(shares) == slots
    assert max(shares) - min(shares) <= 1


def test_small_workers_are_spread_over_the_gateways() -> None:
    """Without the hash, the first gateway would have every worker of one slot."""
    shares = [sum(SlotShare(n, 4).slots_of(f"worker-{w}", 1) for w in range(400)) for n in range(4)]
    assert min(shares) > 60


@given(st.integers(1, 40), st.integers(0, 2000))
def test_parts_of_a_bound_are_never_short_of_it(num_gateways: int, bound: int) -> None:
    parts = num_gateways * SlotShare(0, num_gateways).part_of(bound)
    assert bound <= parts < bound + num_gateways


def test_who_is_not_known_to_the_others_has_no_seat() -> None:
    ring = GatewayRing("b", 2.0, 1.5)
    assert ring.share() is None
    ring.update({"a": 0.5, "b": 0.0, "c": 0.9}, stayed=False, now=10.0)
    ring.update({"a": 0.5, "b": 0.0, "c": 0.9}, stayed=True, now=11.9)
    assert ring.share() is None
    ring.update({"c": 0.5, "b": 0.0}, stayed=True, now=12.1)
    assert ring.share() == SlotShare(0, 2)


def test_who_was_forgotten_begins_anew() -> None:
    ring = GatewayRing("b", 2.0, 1.5)
    ring.update({"a": 0.1, "b": 0.0}, stayed=True, now=10.0)
    ring.update({"a": 0.1, "b": 0.0}, stayed=True, now=13.0)
    assert ring.share() == SlotShare(1, 2)
    ring.update({"b": 0.0}, stayed=False, now=20.0)
    assert ring.share() is None


def test_whether_the_others_were_away_as_well() -> None:
    ring = GatewayRing("b", 2.0, 1.5)
    for now in (10.0, 11.0, 12.0):
        ring.update({"a": 0.9, "b": 0.0}, stayed=True, now=now)
        assert not ring.others_were_away(now)
    ring.update({"a": 4.0, "b": 0.0}, stayed=True, now=13.0)
    ring.update({"a": 0.5, "b": 0.0}, stayed=True, now=14.0)
    assert ring.others_were_away(14.0)
    assert not ring.others_were_away(15.5), "it went away later than that"
    assert ring.others_were_away(11.0), "however long it took to be back"
    ring.update({"a": 0.2, "b": 0.0}, stayed=True, now=19.0)
    assert ring.others_were_away(19.0), "this one was, and they may have been"
    ring.update({"b": 0.0}, stayed=False, now=40.0)
    assert ring.others_were_away(40.0)
    ring.update({"b": 0.0}, stayed=False, now=60.0)
    assert not ring.others_were_away(60.0), "there are none"
