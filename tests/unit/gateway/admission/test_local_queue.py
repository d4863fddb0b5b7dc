"""What a gateway knows of the line."""

from __future__ import annotations

from gateway.admission.local_queue import LocalQueue, Waiter, WaitLimits
from gateway.routing.placement import ANYWHERE, Ranking
from gateway.store.client import Filed, Offers, Order


def waiter(id: str) -> Waiter:
    wait_limits = WaitLimits(0.0, served=True, queue_deadline=1.0, start_deadline=1.0)
    return Waiter(Order(id, "team", 1.0), "m", ANYWHERE, frozenset(), wait_limits, 0.0, Ranking(()), Offers())


def test_an_urgent_call_does_not_make_the_line_look_short() -> None:
    queue, late, urgent = LocalQueue(), waiter("late"), waiter("urgent")
    for one, position in ((late, 500), (urgent, 1)):
        queue.add(one)
        queue.note_filed(one, Filed("1", "1", position))
    assert queue.num_queued("m") == 500
    queue.set_num_queued("m", 3)
    assert queue.num_queued("m") == 3
