"""Where a caller stands: told while it waits, and what is left of it in the headers."""

from __future__ import annotations

import time

from gateway.api.http.diagnostics import answer_headers, ping
from gateway.api.http.streaming import PING
from gateway.telemetry.answer_log import QueuePosition
from gateway.telemetry.request_log import RequestLog
from tests.support.request_logs import attempt, placed_log


def test_a_caller_that_waits_is_told_where_it_stands() -> None:
    request_log = RequestLog("r", "POST", "/v1/chat/completions")
    assert ping(request_log) == PING
    request_log.queue_position.waits(7, 60.0)
    request_log.queue_position.waits(3, 60.0)
    assert ping(request_log) in (b": waiting position=3 wait_s=60.0\n\n", b": waiting position=3 wait_s=59.9\n\n")
    assert dict(answer_headers(request_log))[b"x-queue-position"] == b"7", "where it stood at first"
    request_log.queue_position.served()
    assert ping(request_log) == PING
    assert request_log.line()["queue_position"] == 7


def test_a_caller_whose_model_is_loaded_is_told_how_far_it_is() -> None:
    request_log = RequestLog("r", "POST", "/v1/chat/completions")
    queue_position = request_log.queue_position
    queue_position.waits(2, 60.0, for_worker=True)
    assert ping(request_log) == b": waiting position=2 for=worker\n\n"
    queue_position.loading = "loading=43%"
    assert ping(request_log) == b": waiting position=2 for=worker loading=43%\n\n"
    queue_position.waits(2, 1.0)
    assert ping(request_log).startswith(b": waiting position=2 wait_s="), "its worker has come"
    queue_position.served()
    assert queue_position.loading == ""


def test_a_predicted_wait_grows_shorter_and_is_never_negative() -> None:
    queue_position = QueuePosition()
    assert queue_position.wait_s == 0
    queue_position.waits(1, 0.05)
    first = queue_position.wait_s
    time.sleep(0.01)
    assert 0 < queue_position.wait_s < first <= 0.05
    time.sleep(0.05)
    assert queue_position.wait_s == 0


def test_a_call_that_got_its_slot_at_once_stood_nowhere() -> None:
    request_log = RequestLog("r", "POST", "/v1/chat/completions")
    assert b"x-queue-position" not in dict(answer_headers(request_log)), "nothing is known yet"
    attempt(request_log.answer)
    assert dict(answer_headers(request_log))[b"x-queue-position"] == b"0"
    assert "queue_position" not in request_log.line()


def test_only_who_asks_is_told_why() -> None:
    request_log = placed_log()
    assert b"x-paddock-placement" not in dict(answer_headers(request_log))
    request_log.answer.attempts[0].placement = "w: wait 0 ms"
    assert dict(answer_headers(request_log))[b"x-paddock-placement"] == b"w: wait 0 ms"
