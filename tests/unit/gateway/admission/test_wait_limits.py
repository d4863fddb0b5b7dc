"""Two clocks of a call that waits: one for a slot, one for a worker."""

from __future__ import annotations

from gateway.admission.local_queue import WaitLimits


def test_only_one_clock_runs() -> None:
    wait_limits = WaitLimits(100.0, served=False, queue_deadline=160.0, start_deadline=130.0)
    assert wait_limits.deadline == 130.0
    assert not wait_limits.set_served(105.0, served=False)
    assert wait_limits.deadline == 130.0

    assert wait_limits.set_served(120.0, served=True)
    assert wait_limits.deadline == 180.0, "all of its 60 s for a slot"
    assert wait_limits.set_served(150.0, served=False)
    assert wait_limits.deadline == 160.0, "what was left for a worker: 10 s"
    assert wait_limits.set_served(155.0, served=True)
    assert wait_limits.deadline == 185.0, "what was left for a slot: 30 s"


def test_workers_that_come_and_go_make_no_wait_endless() -> None:
    wait_limits = WaitLimits(0.0, served=True, queue_deadline=10.0, start_deadline=20.0)
    now = 0.0
    while now < wait_limits.deadline:
        now += 0.7
        wait_limits.set_served(now, served=not wait_limits.served)
    assert 20.0 < now < 22.0, "turn and turn about, the shorter clock ends it"
