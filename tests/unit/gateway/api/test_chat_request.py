"""Reading OpenAI's chat dialect: what is taken, and what is refused with which words."""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import pytest

from gateway.api.openai.bodies import IGNORED, REFUSED, ChatBody, StreamUsageOptions
from gateway.api.openai.requests import ChatRequest, read_chat
from gateway.api.parameters.options import MAX_PREDICTION_CHARS
from gateway.errors import InvalidRequest, NotSupported, PaddockError, UnsupportedParameter
from gateway.telemetry.request_log import Ignored
from tests.support.openai_schema import properties
from tests.support.tools import tool_of
from workers.protocol.requests import AdapterUse, Message, Sampling, Speculation, Thinking, ToolCall, decode_object

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def read(**parameters: Any) -> ChatRequest:
    return read_chat(json.dumps({"model": "m", "messages": [USER], **parameters}).encode())


def refused(**parameters: Any) -> PaddockError:
    """What is wrong with it where parameters of no effect are refused."""
    with pytest.raises(PaddockError) as caught:
        read_chat(json.dumps({"model": "m", "messages": [USER], **parameters}).encode(), Ignored(refuses=True))
    return caught.value


def test_the_smallest_request() -> None:
    asked = read()
    assert (asked.model, asked.stream, asked.usage, asked.as_function) == ("m", False, StreamUsageOptions(), False)
    assert asked.requests[0].messages == (Message(role="user", content="hi"),)
    assert asked.requests[0].sampling == Sampling()
    assert asked.requests[0].max_tokens is None
    assert asked.requests[0].stop == ()


def test_every_parameter_arrives() -> None:
    sampling = {
        "temperature": 0,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.01,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "seed": 2**32 - 1,
    }
    asked = read(
        **sampling,
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=5,
        stop=["a", "b"],
        ignore_eos=True,
    )
    assert asked.stream
    assert asked.usage == StreamUsageOptions(at_end=True)
    assert msgspec.to_builtins(asked.requests[0].sampling) == sampling
    assert asked.requests[0].max_tokens == 5
    assert asked.requests[0].stop == ("a", "b")
    assert asked.requests[0].ignore_eos


def test_text_parts_are_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = read(messages=[{"role": "user", "content": parts}])
    assert asked.requests[0].messages[0].content == "one\ntwo"


def test_a_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    asked = read(
        messages=[
            {"role": "developer", "content": "be brief"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}],
        tool_choice="auto",
    )
    assert asked.requests[0].messages[2].tool_calls == (ToolCall("c1", "add", '{"a":1}'),)
    assert asked.requests[0].messages[3].tool_call_id == "c1"
    assert asked.requests[0].tools == (tool_of("add", "d", {"type": "object"}),)


def test_allowed_tools_are_all_that_the_model_sees() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub", "mul")]
    allowed: dict[str, Any] = {"mode": "auto", "tools": [tools[2], tools[0]]}
    request = read(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).requests[0]
    assert ([tool.name for tool in request.tools], request.forced_tools) == (["add", "mul"], ())
    allowed["mode"] = "required"
    request = read(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).requests[0]
    assert request.forced_tools == ("add", "mul")
    error = refused(tools=tools[:1], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert error.param == "tool_choice.allowed_tools.tools.0"


def test_tool_choice_none_hides_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert read(tools=tools, tool_choice="none").requests[0].tools == ()


def test_a_seed_of_minus_one_is_drawn_here_so_that_no_default_replaces_it() -> None:
    drawn = [read(seed=-1).requests[0].sampling.seed for _ in range(20)]
    assert all(seed is not None and 0 <= seed <= 2**32 - 2 for seed in drawn)
    assert len(set(drawn)) > 1
    assert read().requests[0].sampling.seed is None


@pytest.mark.parametrize(
    "parameters",
    [
        {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "store": False, "service_tier": "auto"},
        {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "modalities": ["text"]},
        {"temperature": None, "stop": None, "tools": None, "response_format": None, "audio": None, "unknown": None},
        {"cache_prompt": True},
        {"response_format": {"type": "text"}, "stop": [], "functions": []},
    ],
)
def test_what_asks_for_nothing_passes(parameters: dict[str, Any]) -> None:
    assert read(**parameters).requests == read().requests


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"messages": []}, "messages", "`messages` has 0 items. Send at least 1."),
        ({"messages": "hi"}, "messages", "is 'hi'. Send an array."),
        ({"messages": [1]}, "messages.0", "is 1. Send an object."),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "is 'robot'. Send 'system', "),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
        ({"messages": [USER, {"role": "user", "content": 7}]}, "messages.1.content", "is 7. Send a string."),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "missing"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages.0.content.0.type", "missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "missing"),
        ({"model": 3}, "model", "string"),
        ({"temperature": 100.1}, "temperature", "is 100.1. Send at most 100."),
        ({"temperature": -0.1}, "temperature", "Send at least 0."),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "Send at most 1."),
        ({"max_tokens": -2}, "max_tokens", "is -2. Send at least -1."),
        ({"max_tokens": -5}, "max_tokens", "is -5"),
        ({"max_tokens": 10**30}, "max_tokens", "Send at most 2147483647."),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "contradict"),
        ({"repeat_penalty": 0}, "repeat_penalty", "is 0. Send at least 0.01."),
        ({"seed": 2**32}, "seed", "Send at most 4294967295."),
        ({"stop": ""}, "stop", "1 to 512"),
        ({"stop": ["a", "b" * 513]}, "stop.1", "513 characters"),
        ({"stop": ["a"] * 129}, "stop", "`stop` has 129 items. Send at most 128."),
        ({"stream": "yes"}, "stream", "is 'yes'. Send true or false."),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tool_choice": "maybe"}, "tool_choice", "`auto`, `none`"),
        ({"tool_choice": 4}, "tool_choice", "string"),
    ],
)
def test_wrong_values_are_named_by_their_path(parameters: dict[str, Any], param: str, words: str) -> None:
    error = refused(**parameters)
    assert type(error) is InvalidRequest
    assert error.param == param
    assert words in error.message
    assert param in error.message


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"audio": {"voice": "x"}}, "audio", "text"),
        ({"store": True}, "store", "keeps no answers"),
        ({"service_tier": "flex"}, "service_tier", "one tier"),
        ({"verbosity": "low"}, "verbosity", "in the prompt"),
        ({"surprise": 1}, "surprise", "Leave it out"),
        ({"best_of": 3}, "best_of", "with `n`"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty", "another name"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk", "Leave it out"),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages.0.content.0", "text parts"),
        ({"tools": [{"type": "web_search", "custom": {"name": "x"}}]}, "tools.0", "custom"),
    ],
)
def test_what_is_not_supported_is_named_with_a_remedy(parameters: dict[str, Any], param: str, words: str) -> None:
    error = refused(**parameters)
    assert type(error) is UnsupportedParameter
    assert (error.status, error.code) == (400, "unsupported_parameter")
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("kind", ["video_url", "input_video", "audio_url"])
def test_films_are_for_other_servers(kind: str) -> None:
    error = refused(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]}])
    assert type(error) is NotSupported
    assert (error.status, error.param) == (501, "messages.0.content.1")
    assert kind in error.message


@pytest.mark.parametrize(
    ("parameters", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "high"}, Thinking(effort="high")),
        ({"reasoning_effort": "none"}, Thinking(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(enabled=False)),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, Thinking(enabled=True)),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, Thinking(enabled=True)),
        ({"chat_template_kwargs": {"thinking": False}}, Thinking(enabled=False)),
        ({"enable_thinking": True, "thinking": False}, Thinking(enabled=True)),
        ({"thinking": True}, Thinking(enabled=True)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Thinking(enabled=True, budget=9)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_budget_tokens": 7}, Thinking(True, budget=7)),
        ({"thinking": {"type": "adaptive"}}, Thinking(enabled=True)),
        ({"thinking": {"type": "auto"}}, Thinking()),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, Thinking(enabled=False, effort="low")),
        ({"reasoning_budget_message": "Enough.", "reasoning_budget_tokens": 3}, Thinking(budget=3, message="Enough.")),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, Thinking(effort="low")),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "max"}, Thinking(effort="max")),
        ({"reasoning_format": "none"}, Thinking(split=False)),
        ({"reasoning_format": "deepseek"}, Thinking()),
        ({"reasoning_budget_tokens": 5, "thinking_budget_tokens": 7}, Thinking(budget=5)),
        ({"thinking_budget_tokens": 0}, Thinking(budget=0)),
    ],
)
def test_how_a_model_is_to_think(parameters: dict[str, Any], thinking: Thinking) -> None:
    request = read(**parameters).requests[0]
    assert request.thinking == thinking
    assert request.template_values == ""


def test_what_a_call_keeps_of_schemas_and_template_values_is_text() -> None:
    """Decoded, 15 KiB were 5,000 objects: 120 waiting calls had the garbage collector stop all streams for 65 ms."""
    lists: list[Any] = [[] for _ in range(5000)]
    function = {"name": "f", "parameters": {"a": lists}}
    form = {"type": "json_schema", "json_schema": {"name": "g", "schema": {"enum": lists}}}
    bodies: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": function}]},
        {"functions": [function]},
        {"chat_template_kwargs": {"a": lists}},
        {"documents": [{"a": lists}]},
        {"response_format": form},
        {"metadata": {"a": lists}},
    ]
    read()
    for body in bodies:
        gc.collect()
        before = len(gc.get_objects())
        asked = read(**body)
        gc.collect()
        assert len(gc.get_objects()) - before < 200, list(body)
        assert asked.requests


def test_what_a_template_gets() -> None:
    documents = [{"title": "a", "text": "b"}, "c"]
    kwargs = {"tone": {"warm": True}, "enable_thinking": True, "reasoning_effort": 3}
    request = read(documents=documents, chat_template_kwargs=kwargs, continue_final_message=False).requests[0]
    assert decode_object(request.template_values) == {
        "tone": {"warm": True},
        "reasoning_effort": 3,
        "documents": documents,
        "continue_final_message": False,
    }


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
        ({"lora": [{"id": "a"}, {"id": "a", "scale": 0}]}, "lora.1.id"),
        ({"lora": [{"id": -1}]}, "lora.0.id"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
        ({"messages": [{"role": "function", "content": "2"}]}, "messages.0.name"),
    ],
)
def test_extensions_with_wrong_values(parameters: dict[str, Any], param: str) -> None:
    error = refused(**parameters)
    assert (type(error), error.param) == (InvalidRequest, param)
    assert f"`{param}`" in error.message


def test_a_reasonable_past_is_read() -> None:
    [_, thought, other, refusal] = (
        read(
            messages=[
                USER,
                {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
                {"role": "assistant", "content": None, "reasoning": "hm"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ]
        )
        .requests[0]
        .messages
    )
    assert (thought.content, thought.reasoning) == ("2", "one and one")
    assert (other.content, other.reasoning) == (None, "hm")
    assert refusal.content == "no"


def test_functions_are_the_older_form_of_tools() -> None:
    asked = read(
        messages=[
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
            {"role": "function", "name": "add", "content": "2"},
        ],
        functions=[{"name": "add", "description": "d", "parameters": {"type": "object"}}],
        function_call={"name": "add"},
    )
    request = asked.requests[0]
    assert asked.as_function
    assert request.tools == (tool_of("add", "d", {"type": "object"}),)
    assert (request.forced_tools, request.parallel_tool_calls) == (("add",), False)
    call, result = request.messages[1:]
    assert call.tool_calls == (ToolCall("call_1", "add", "{}"),)
    assert (result.role, result.content, result.name, result.tool_call_id) == ("tool", "2", "add", "call_1")
    assert read(functions=[{"name": "f"}], function_call="none").requests[0].tools == ()
    assert not read(functions=[], function_call="none").as_function


def test_tool_results_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "sunny, "}, {"type": "text", "text": "21"}]
    asked = read(messages=[USER, {"role": "tool", "tool_call_id": "c", "content": parts}])
    assert asked.requests[0].messages[1].content == "sunny, \n21"


def test_what_a_caller_wants_to_be_told() -> None:
    wishes = {"return_progress": True, "timings_per_token": True, "return_tokens": True}
    assert read(**wishes, stream=True).requests[0].tell == ("progress", "timings", "tokens")
    assert read(**wishes).requests[0].tell == ("tokens",), "a whole answer comes when the rest is over"
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert read(stream=True, stream_options=usage).usage == StreamUsageOptions(at_end=True, always=True)


def test_adapters_and_lengths() -> None:
    asked = read(lora=[{"id": "pirate", "scale": 0.5}, {"id": "poet"}], n_predict=-1, parallel_tool_calls=False)
    request = asked.requests[0]
    assert request.adapters == (AdapterUse("pirate", 0.5), AdapterUse("poet"))
    assert request.max_tokens is None
    assert not request.parallel_tool_calls
    assert read(n_predict=0).requests[0].max_tokens == 0, "the prompt is only read"
    assert read(max_tokens=-1).requests[0].max_tokens is None, "as clients of llama-server say it"
    assert read(max_completion_tokens=0).requests[0].max_tokens == 0


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no body"),
        (b"  ", "no body"),
        (b"[]", "an array"),
        (b"null", "null"),
        (b"true", "a boolean"),
        (b"1", "a number"),
        (b'{"model": "m",}', "byte 14"),
        (b'{"model": NaN}', "byte 10"),
        (b'{"model": Infinity}', "byte 10"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"model": "m"', "ends too early, at byte 13"),
        (b'{"model": "\xff"}', "byte 11 is 0xff"),
        (b'{"model": "\\ud800"}', "surrogate"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"\xef\xbb\xbf{}", "byte 0"),
    ],
)
def test_broken_bodies_say_where(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_chat(raw)
    assert caught.value.status == 400


def nested(depth: int) -> bytes:
    deep = '{"a":' * depth + "1" + "}" * depth
    function = '{"name": "f", "parameters": ' + deep + "}"
    raw = '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":%s}]}'
    return (raw % function).encode()


@pytest.mark.parametrize("depth", [1, 50, 99])
def test_deep_schemas_can_be_sent_on(depth: int) -> None:
    assert msgspec.json.encode(read_chat(nested(depth)).requests[0])


@pytest.mark.parametrize("depth", [101, 900, 990, 2000, 100_000])
def test_deeper_ones_are_refused(depth: int) -> None:
    with pytest.raises(InvalidRequest, match=r"nested (too|more than 100 levels) deep"):
        read_chat(nested(depth))


def test_values_in_messages_stay_short() -> None:
    error = refused(temperature="x" * 100_000)
    assert len(error.message) < 300
    assert len(refused(**{"p" * 100_000: 1}).message) < 400


def test_several_problems_are_counted() -> None:
    assert "1 more problem" in refused(temperature=101, top_p=3).message


def test_every_parameter_of_openai_is_read_ignored_or_refused() -> None:
    handled = set(ChatBody.model_fields) | {*IGNORED, *REFUSED}
    assert properties("CreateChatCompletionRequest") <= handled
    assert not set(ChatBody.model_fields) & ({*IGNORED, *REFUSED})


def test_drafts_are_asked_for_by_the_names_of_others() -> None:
    asked = read(speculation=False, **{"speculative.n_max": 7, "speculative.n_min": 2, "speculative.p_min": 0.5})
    assert asked.requests[0].speculation == Speculation(enabled=False, n_max=7, n_min=2, p_min=0.5)
    assert read(speculation="auto").requests == read(speculation=True).requests == read().requests
    for parameters in ({"speculation": "always"}, {"speculative.n_max": -2}, {"speculative.p_min": 2}):
        assert refused(**parameters).param in ("speculation", *parameters)


def test_a_prediction_is_read_whole_or_in_parts() -> None:
    parts = [{"type": "text", "text": "def f"}, {"type": "text", "text": "(x):"}]
    for content in ("def f(x):", parts):
        asked = read(prediction={"type": "content", "content": content})
        assert asked.requests[0].speculation.prediction == "def f(x):"
    long = read(prediction={"type": "content", "content": "x" * (MAX_PREDICTION_CHARS + 9)})
    assert len(long.requests[0].speculation.prediction) == MAX_PREDICTION_CHARS
    assert refused(prediction={"type": "content", "content": [{"type": "image_url"}]}).param
