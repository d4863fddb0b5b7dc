"""Parameters that nothing is done with, and other names of those that are read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from gateway.api.anthropic.body import MessagesBody
from gateway.api.native.request import read_completion as read_native
from gateway.api.openai.bodies import ChatBody
from gateway.api.openai.requests import ChatRequest, read_chat
from gateway.api.parameters.base import Body
from gateway.api.parameters.unsupported import read_body
from gateway.api.responses.body import ResponsesBody
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.telemetry.request_log import MAX_NAME_CHARS, MAX_NAMES, UNKNOWN, Ignored
from workers.protocol.requests import GenerateRequest

USER = {"role": "user", "content": "hi"}


def read(ignored: Ignored | None = None, **parameters: Any) -> ChatRequest:
    return read_chat(json.dumps({"model": "m", "messages": [USER], **parameters}).encode(), ignored)


def native(**parameters: Any) -> GenerateRequest:
    raw = json.dumps({"prompt": "hi", **parameters}).encode()
    return read_native(raw, {"type": "http", "query_string": b""}).requests[0]


HARMLESS: dict[str, Any] = {
    "store": True,
    "verbosity": "low",
    "service_tier": "flex",
    "chat_id": "c1",
    "reasoning_control": True,
    "tfs_z": 0.9,
    "num_ctx": 4096,
    "raw": True,
    "keep_alive": "5m",
    "surprise": {"a": [1]},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_harms_nobody_is_ignored_and_told(name: str) -> None:
    ignored = Ignored()
    assert read(ignored, **{name: HARMLESS[name]}).requests == read().requests
    assert ignored.header == name
    assert ignored.labels == [UNKNOWN if name == "surprise" else name]


@pytest.mark.parametrize("parameters", [{"store": False}, {"best_of": 1}, {"verbosity": "medium"}, {"surprise": None}])
def test_what_asks_for_nothing_is_not_told(parameters: dict[str, Any]) -> None:
    ignored = Ignored()
    assert read(ignored, **parameters).requests == read().requests
    assert ignored.header == ""


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 2},
        {"include_stop_str_in_output": True},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 5},
        {"format": "json"},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_would_change_the_answer_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        read(**parameters)
    assert caught.value.param in parameters
    (name,) = parameters
    if name != "modalities":
        with pytest.raises(UnsupportedParameter):
            native(**parameters)


@pytest.mark.parametrize(
    ("parameters", "same"),
    [
        ({"repetition_penalty": 1.2}, {"repeat_penalty": 1.2}),
        ({"typ_p": 0.5}, {"typical_p": 0.5}),
        ({"mirostat_mode": 2}, {"mirostat": 2}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"num_keep": 3}, {"n_keep": 3}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"skip_special_tokens": False}, {"special": True}),
    ],
)
def test_other_names(parameters: dict[str, Any], same: dict[str, Any]) -> None:
    ignored = Ignored()
    assert read(ignored, **parameters).requests == read(**same).requests != read().requests
    assert native(**parameters) == native(**same) != native()
    assert ignored.header == ""


def test_another_name_has_the_bounds_of_the_parameter() -> None:
    with pytest.raises(InvalidRequest, match="`repeat_penalty` is 11"):
        read(repetition_penalty=11)


def test_of_two_names_the_first_counts_and_the_other_is_told() -> None:
    ignored = Ignored()
    asked = read(ignored, repetition_penalty=1.2, repeat_penalty=1.3)
    assert asked.requests[0].sampling.repeat_penalty == 1.3
    assert ignored.header == "repetition_penalty"


def test_hot_samplers_and_many_stops() -> None:
    request = native(temperature=5, stop=[f"s{n}" for n in range(100)])
    assert request.sampling.temperature == 5
    assert len(request.stop) == 100


def test_fields_within_a_parameter_count_as_well() -> None:
    ignored = Ignored()
    tool = {"type": "function", "function": {"name": "f", "cache_control": {"type": "ephemeral"}}}
    assert read(ignored, tools=[tool] * 2).requests[0].tools[0].name == "f"
    assert ignored.header == "cache_control"


def test_a_header_is_short_and_safe() -> None:
    ignored = Ignored()
    hostile = "x\r\nset-cookie: a=b\u2028"
    read(ignored, **{hostile: 1, "y" * 10_000: 1, "": 1, **{f"n{n}": 1 for n in range(50)}})
    names = ignored.header.split(", ")
    assert names[0] == "x??set-cookie??a?b?"
    assert names[1] == "y" * MAX_NAME_CHARS
    assert names[-1] == "..."
    assert len(names) == MAX_NAMES + 1
    assert ignored.header.isascii()
    assert ignored.labels == [UNKNOWN]


MANY = 1000
CALLS = [{"id": "a", "function": {"name": "", "arguments": ""}}] * 8
TEXTS = [{"type": "text", "text": ""}] * 8


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": CALLS}] * MANY}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": TEXTS}] * MANY}),
        (ResponsesBody, {"input": [{"type": "reasoning", "summary": TEXTS}] * MANY}),
    ],
)
def test_others_may_run_between_two_messages_that_are_validated(kind: type[Body], document: dict[str, Any]) -> None:
    """The interpreter is let go of in Python code: in one call, 28,000 tool calls held up every stream for 90 ms."""
    num_calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        read_body(kind, document, ({}, {}), Ignored())
    finally:
        sys.setprofile(before)
    assert num_calls >= MANY
