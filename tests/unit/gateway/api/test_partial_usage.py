"""Tokens of answers that are cut off."""

from __future__ import annotations

from gateway.api.responder import PartialUsage
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import Logprobs, Reasoning, Started, Text, TokenLogprob, ToolCallDelta, Usage


def test_what_came_of_an_answer_counts() -> None:
    request_log = RequestLog("r", "POST", "/")
    partial_usage = PartialUsage(request_log)
    one = TokenLogprob(1, b"a", -0.1)
    partial_usage.add(0, [Started(1, 0, 7, 3), Reasoning(1, "hm", 2)])
    partial_usage.add(0, [Logprobs(1, one, ()), Text(1, "a"), ToolCallDelta(1, 0, "c", "f", "", 0)])
    partial_usage.add_to(request_log)
    assert request_log.usage == Usage(7, 3, 3)


def test_answers_that_have_ended_tell_their_own() -> None:
    """Tokens that became no text are among them, and take nothing from those that are cut off."""
    request_log = RequestLog("r", "POST", "/")
    request_log.split(2)
    partial_usage = PartialUsage(request_log, (True, True))
    for choice in range(2):
        partial_usage.add(choice, [Started(choice, 0, 7, 3), Text(choice, "a")])
    request_log.add_usage(partial_usage.ended(0, Usage(7, 9, 3)))
    assert partial_usage.num_generated == 10
    partial_usage.add_to(request_log)
    assert request_log.usage == Usage(14, 10, 6)


def test_a_prompt_counts_once_for_all_its_answers() -> None:
    request_log = RequestLog("r", "POST", "/")
    request_log.split(3)
    partial_usage = PartialUsage(request_log, (True, False, False))
    for choice in range(3):
        partial_usage.add(choice, [Started(choice, 0, 7, 3 + choice, 2), Text(choice, "a")])
    request_log.add_usage(partial_usage.ended(1, Usage(7, 1, 4, media_tokens=2)))
    partial_usage.add_to(request_log)
    assert request_log.usage == Usage(7, 3, 3, media_tokens=2)


def test_each_answers_log_tells_what_has_come_of_it_so_far() -> None:
    """By which the team of a caller who leaves is charged."""
    request_log = RequestLog("r", "POST", "/")
    logs = request_log.split(2)
    partial_usage = PartialUsage(request_log, (True, True))
    partial_usage.add(1, [Started(1, 0, 7, 3), Text(1, "a", 2)])
    partial_usage.add(1, [Reasoning(1, "b")])
    assert [log.num_generated for log in logs] == [0, 3]
    partial_usage.ended(1, Usage(7, 4, 3))
    assert [log.num_generated for log in logs] == [0, 0], "its last event tells"


def test_nothing_is_counted_where_nothing_came() -> None:
    request_log = RequestLog("r", "POST", "/")
    partial_usage = PartialUsage(request_log)
    partial_usage.add_to(request_log)
    assert request_log.usage is None
