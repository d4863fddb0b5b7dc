"""What a gateway knows of the line."""

from __future__ import annotations

from gateway.admission.local_queue import Line, Patience, Waiter
from gateway.routing.placement import ANYWHERE, Ranking
from gateway.store.client import Filed, Offers, Order


def waiter(id: str) -> Waiter:
    patience = Patience(0.0, served=True, queue_deadline=1.0, start_deadline=1.0)
    return Waiter(Order(id, "team", 1.0), "m", ANYWHERE, frozenset(), patience, 0.0, Ranking(()), Offers())


def test_an_urgent_call_does_not_make_the_line_look_short() -> None:
    line, late, urgent = Line(), waiter("late"), waiter("urgent")
    for one, position in ((late, 500), (urgent, 1)):
        line.enter(one)
        line.filed(one, Filed("1", "1", position))
    assert line.in_line("m") == 500
    line.heard("m", 3)
    assert line.in_line("m") == 3
