"""Where a caller stands: told while it waits, and what is left of it in the headers."""

from __future__ import annotations

import time

from gateway.api.http.diagnostics import answer_headers, ping
from gateway.api.http.streaming import PING
from gateway.telemetry.record import Standing
from gateway.telemetry.trail import Trail


def test_a_caller_that_waits_is_told_where_it_stands() -> None:
    trail = Trail("r", "POST", "/v1/chat/completions")
    assert ping(trail) == PING
    trail.standing.waits(7, 60.0)
    trail.standing.waits(3, 60.0)
    assert ping(trail) in (b": waiting position=3 wait_s=60.0\n\n", b": waiting position=3 wait_s=59.9\n\n")
    assert dict(answer_headers(trail))[b"x-queue-position"] == b"7", "where it stood at first"
    trail.standing.served()
    assert ping(trail) == PING
    assert trail.line()["queue_position"] == 7


def test_a_predicted_wait_grows_shorter_and_is_never_negative() -> None:
    standing = Standing()
    assert standing.wait_s == 0
    standing.waits(1, 0.05)
    first = standing.wait_s
    time.sleep(0.01)
    assert 0 < standing.wait_s < first <= 0.05
    time.sleep(0.05)
    assert standing.wait_s == 0


def test_a_call_that_got_its_slot_at_once_stood_nowhere() -> None:
    trail = Trail("r", "POST", "/v1/chat/completions")
    assert b"x-queue-position" not in dict(answer_headers(trail)), "nothing is known yet"
    trail.worker = "w"
    assert dict(answer_headers(trail))[b"x-queue-position"] == b"0"
    assert "queue_position" not in trail.line()


def test_only_who_asks_is_told_why() -> None:
    trail = Trail("r", "POST", "/v1/chat/completions", worker="w")
    assert b"x-paddock-placement" not in dict(answer_headers(trail))
    trail.placement = "w: wait 0 ms"
    assert dict(answer_headers(trail))[b"x-paddock-placement"] == b"w: wait 0 ms"
