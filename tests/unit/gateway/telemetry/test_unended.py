"""Tokens of answers that are cut off."""

from __future__ import annotations

from gateway.api.responder import Unended
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import Logprobs, Reasoning, Started, Text, TokenLogprob, ToolCallDelta, Usage


def test_what_came_of_an_answer_counts() -> None:
    request_log, unended = RequestLog("r", "POST", "/"), Unended()
    one = TokenLogprob(1, b"a", -0.1)
    unended.hear(0, [Started(1, 0, 7, 3), Reasoning(1, "hm", 2)])
    unended.hear(0, [Logprobs(1, one, ()), Text(1, "a"), ToolCallDelta(1, 0, "c", "f", "", 0)])
    unended.note(request_log)
    assert request_log.usage == Usage(7, 3, 3)


def test_answers_that_have_ended_tell_their_own() -> None:
    """Tokens that became no text are among them, and take nothing from those that are cut off."""
    request_log, unended = RequestLog("r", "POST", "/"), Unended()
    for choice in range(2):
        unended.hear(choice, [Started(choice, 0, 7, 3), Text(choice, "a")])
    request_log.used(Usage(7, 9, 3))
    unended.ended(0)
    unended.note(request_log)
    assert request_log.usage == Usage(14, 10, 6)


def test_nothing_is_counted_where_nothing_came() -> None:
    request_log, unended = RequestLog("r", "POST", "/"), Unended()
    unended.note(request_log)
    assert request_log.usage is None
