"""Prompts and answers in the log: nobody's, unless an operator has asked for them; then bounded."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gateway.call import Call, Principal
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.prompts import MAX_CHARS, UNWRITTEN, Excerpt, WrittenPrompts
from workers.protocol.events import CallEvent, Finished, FinishReason, Reasoning, Text, Timings, ToolCallDelta, Usage
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest, Infill, Message

CALL = Call("r", Principal("k", "red", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)
END = Finished(1, FinishReason.STOP, Usage(1, 1, 0), Timings(0, 1, 1.0, 1, 1.0))


class Answer:
    choice = 0

    def __init__(self, *events: CallEvent) -> None:
        self.ended = False
        self.end: Any = None
        self._events = [*events, END]

    async def take(self, push: object = None) -> list[CallEvent]:
        self.ended, self.end = True, END
        return self._events


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [record for record in caplog.records if record.getMessage() == "prompt"]
    fields: dict[str, Any] = vars(record)["fields"]
    return fields


async def test_nothing_is_written_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    heard = UNWRITTEN.begins(CALL, AnswerLog(), GenerateRequest(prompt="canary"))
    answer = Answer(Text(1, "canary"))
    assert heard.of(answer) is answer
    heard.ends()
    assert caplog.records == []


async def test_it_is_said_that_it_is_and_every_part_is_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = WrittenPrompts()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    heard = prompts.begins(CALL, AnswerLog(), GenerateRequest(messages=(Message("user", "why?"),)))
    events = (Reasoning(1, "hm"), Text(1, "be"), Text(1, "cause"), ToolCallDelta(1, 0, "c", "look", ""))
    answer = heard.of(Answer(*events, ToolCallDelta(1, 0, "", "", '{"a":1}')))
    await answer.take()
    assert answer.ended
    assert answer.end is END
    heard.ends()
    told = line(caplog)
    assert told["prompt"] == '[{"role":"user","content":"why?"}]'
    assert (told["answer"], told["thought"], told["tool_calls"]) == ("because", "hm", 'look{"a":1}')
    assert (told["request_id"], told["team"]) == ("r", "red")


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (GenerateRequest(prompt="once"), "once"),
        (GenerateRequest(prompt=(1, "two")), '[1,"two"]'),
        (GenerateRequest(infill=Infill("a", "b")), '{"prefix":"a","suffix":"b"}'),
        (PoolRequest(inputs=("a", (1, 2))), '["a",[1,2]]'),
        (PoolRequest(inputs=("a",), kind="rank", query="q"), '["q","a"]'),
    ],
)
def test_every_kind_of_request(request_: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    WrittenPrompts().begins(CALL, AnswerLog(), request_).ends()
    assert line(caplog)["prompt"] == text


def test_of_a_long_text_the_middle_is_left_out() -> None:
    whole, pieces = Excerpt(), Excerpt()
    text = "".join(f"{number} " for number in range(20_000))
    whole.add(text)
    for start in range(0, len(text), 7):
        pieces.add(text[start : start + 7])
    assert whole.text() == pieces.text()
    assert whole.text().startswith("0 1 2 ")
    assert whole.text().endswith("19998 19999 ")
    assert f"[{len(text) - MAX_CHARS} characters are left out here]" in whole.text()
    assert len(whole.text()) < MAX_CHARS + 100
    short = Excerpt()
    short.add("x" * MAX_CHARS)
    assert short.text() == "x" * MAX_CHARS
