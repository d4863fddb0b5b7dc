"""Two clocks of a call that waits: one for a slot, one for a worker."""

from __future__ import annotations

from gateway.admission.local_queue import Patience


def test_only_one_clock_runs() -> None:
    patience = Patience(100.0, served=False, queue_deadline=160.0, start_deadline=130.0)
    assert patience.deadline == 130.0
    assert not patience.turn(105.0, served=False)
    assert patience.deadline == 130.0

    assert patience.turn(120.0, served=True)
    assert patience.deadline == 180.0, "all of its 60 s for a slot"
    assert patience.turn(150.0, served=False)
    assert patience.deadline == 160.0, "what was left for a worker: 10 s"
    assert patience.turn(155.0, served=True)
    assert patience.deadline == 185.0, "what was left for a slot: 30 s"


def test_workers_that_come_and_go_make_no_wait_endless() -> None:
    patience = Patience(0.0, served=True, queue_deadline=10.0, start_deadline=20.0)
    now = 0.0
    while now < patience.deadline:
        now += 0.7
        patience.turn(now, served=not patience.served)
    assert 20.0 < now < 22.0, "turn and turn about, the shorter clock ends it"
