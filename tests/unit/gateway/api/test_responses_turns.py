"""Which turns of a conversation are dropped where it is too long."""

from __future__ import annotations

from gateway.api.responses.truncation import turns_of, without
from workers.protocol.requests import GenerateRequest, Message, ToolCall


def test_results_stay_with_their_calls_and_rules_stay() -> None:
    rules, late = Message(role="system", content="rules"), Message(role="developer", content="more")
    hello = Message(role="assistant", content="hello")
    ask = Message(role="user", content="a")
    call = Message(role="assistant", tool_calls=(ToolCall("c", "f", "{}"),))
    result = Message(role="tool", content="1", tool_call_id="c")
    last = Message(role="user", content="b")
    request = GenerateRequest(messages=(rules, hello, ask, call, late, result, last))
    turns = turns_of(request.messages)
    assert turns == [(hello,), (ask, call, result), (last,)]
    assert without(request, turns, 0) == request
    assert without(request, turns, 1).messages == (rules, ask, call, late, result, last)
    assert without(request, turns, 2).messages == (rules, late, last)
