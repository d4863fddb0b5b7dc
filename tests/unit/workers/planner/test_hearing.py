"""Senders whose clocks differ: who is alive, and by what their times are corrected."""

from __future__ import annotations

from tests.unit.workers.planner.reports import NOW, report
from workers.planner.hearing import FORGOTTEN_S, UNSURE_S, Hearing
from workers.planner.messages import MachineReport, decode_report, encode
from workers.protocol.residency import LIFE_S


def hearing() -> Hearing[MachineReport]:
    return Hearing(decode_report)


def fields(**at: float) -> dict[bytes, bytes]:
    return {name.encode(): encode(report(when)) for name, when in at.items()}


def test_a_new_message_is_one_of_a_sender_that_is_alive_until_it_is_silent() -> None:
    heard = hearing()
    assert heard.take(fields(a=NOW - 0.2), NOW, clock=10.0) == {"a"}
    assert heard.take(fields(a=NOW - 0.2), NOW + 1, clock=11.0) == frozenset()
    assert [*heard.live(10.0 + LIFE_S)] == ["a"]
    assert not heard.live(10.1 + LIFE_S)
    assert not heard.forgotten(10.0 + LIFE_S)
    assert heard.forgotten(10.1 + FORGOTTEN_S) == ["a"]


def test_a_message_that_seems_old_may_be_one_of_a_clock_that_is_wrong() -> None:
    heard = hearing()
    heard.take(fields(slow=NOW - 3600, dead=NOW - 7), NOW, clock=10.0)
    assert heard.is_unsure(10.0)
    assert not heard.live(10.0)
    heard.take(fields(slow=NOW - 3599.5, dead=NOW - 7), NOW + 0.5, clock=10.5)
    assert [*heard.live(10.5)] == ["slow"]
    assert heard.is_unsure(10.5), "`dead` may write as well"
    assert not heard.is_unsure(10.0 + UNSURE_S)
    (slow,) = heard.live(10.5).values()
    assert slow.lag_s == 3600


def test_the_message_that_came_fastest_says_how_clocks_differ() -> None:
    heard = hearing()
    for number, delay_s in enumerate((0.4, 0.1, 0.45, 0.3)):
        heard.take(fields(a=NOW + number), NOW + number + delay_s, clock=10.0 + number)
    assert abs(heard.live(13.0)["a"].lag_s - 0.1) < 1e-6
    heard.take(fields(a=NOW + 60), NOW + 4 + 0.3, clock=14.0)  # its clock was set
    assert abs(heard.live(14.0)["a"].lag_s + 55.7) < 1e-6


def test_one_who_has_left_and_one_that_can_not_be_read_are_not_there() -> None:
    heard = hearing()
    heard.take(fields(a=NOW, b=NOW) | {b"\xff": b"{}", b"c": b"nonsense"}, NOW, clock=1.0)
    assert sorted(heard.live(1.0)) == ["a", "b"]
    heard.take(fields(b=NOW), NOW, clock=1.1)
    assert [*heard.live(1.1)] == ["b"]


def test_a_reader_that_was_stopped_hears_before_it_judges() -> None:
    heard = hearing()
    heard.take(fields(a=NOW), NOW, clock=1.0)
    heard.take(fields(a=NOW + 60), NOW + 60, clock=61.0)
    assert [*heard.live(61.0)] == ["a"]
