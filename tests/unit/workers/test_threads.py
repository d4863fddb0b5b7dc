"""Threads that run from the start of their process."""

from __future__ import annotations

import threading

import pytest

from workers.process.limits import started_threads


def test_the_threads_of_a_pool_run_before_its_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = started_threads("counting", 3)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a job started a thread"))
    assert [threads.submit(int, "12").result(10) for _ in range(20)] == [12] * 20
    threads.shutdown()


def test_a_pool_that_can_not_start_all_threads_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waited for the others for ever would keep the process from ending."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def two_at_most(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", two_at_most)
    with pytest.raises(RuntimeError, match="new thread"):
        started_threads("counting", 3)
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)
