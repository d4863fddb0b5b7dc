"""What a gateway knows of the line."""

from __future__ import annotations

from gateway.admission.local_queue import LocalQueue, Waiter, WaitLimits
from gateway.routing.placement import ANYWHERE, Ranking
from gateway.store.client import Filed, Lease, Offers, Order
from workers.protocol.heartbeat import WorkerAddress


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


def test_models_that_are_in_use_or_were_lately() -> None:
    queue, waiting = LocalQueue(), waiter("waiting")
    lease = Lease("l1", 1, WorkerAddress("held", "w1", "boot1", "http://w1:1"))
    queue.add_lease(lease, 100.0, 0.0)
    queue.add(waiting)
    assert queue.used_since(200.0) == {"held", "m"}
    assert (queue.used_at("held"), queue.used_at("m")) == (100.0, None)
    queue.remove_lease(lease, 150.0)
    queue.remove(waiting)
    assert queue.used_at("held") == 150.0
    assert queue.used_since(149.0) == {"held"}
    assert not queue.used_since(150.0)
