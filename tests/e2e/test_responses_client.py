"""The official client's `responses` against a running Paddock with the demo model: sync, async and its helpers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.resources.responses.responses import ResponsesConnection
from openai.types.chat import ChatCompletionMessageCustomToolCall
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseInputParam,
)
from openai.types.responses.responses_server_event import ResponseWsError

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.openai_schema import check
from tests.support.stack import Stack

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
QUESTION = "What is the weather in Paris?"


class Order(pydantic.BaseModel):
    item: Literal["tea", "coffee"]
    count: Literal[1, 2, 3]


@pytest.fixture
def client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_stack.gateways[0].url}/v1", api_key=demo_stack.key, max_retries=0) as opened:
        yield opened


def test_create_and_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model=DEMO_ALIAS, input="Who are you?", temperature=0)
    check("Response", first.model_dump(exclude_unset=True))
    assert "Paddock" in first.output_text
    assert first.usage is not None
    chat = client.chat.completions.create(
        model=DEMO_ALIAS, messages=[{"role": "user", "content": "Who are you?"}], temperature=0
    )
    assert first.output_text == chat.choices[0].message.content
    second = client.responses.create(
        model=DEMO_ALIAS, input="Who are you?", previous_response_id=first.id, temperature=0
    )
    again: ResponseInputParam = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Who are you?"},
    ]
    spelled = client.responses.create(model=DEMO_ALIAS, input=again, temperature=0, store=False)
    assert second.output_text == spelled.output_text
    assert second.usage is not None
    assert spelled.usage is not None
    assert second.usage.input_tokens == spelled.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_the_stream_helper(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=DEMO_ALIAS, input="Who are you?", temperature=0)
    with client.responses.stream(model=DEMO_ALIAS, input="Who are you?", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == whole.output_text
    assert len(snapshots) > 5


def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": DEMO_ALIAS,
        "tools": [{"type": "custom", "name": "get_weather", "description": "Current weather of a city"}],
        "tool_choice": {"type": "custom", "name": "get_weather"},
        "temperature": 0,
        "max_output_tokens": 100,
    }
    first = client.responses.create(input=QUESTION, **asked)
    check("Response", first.model_dump(exclude_unset=True))
    [call] = first.output
    assert isinstance(call, ResponseCustomToolCall)
    assert call.name == "get_weather"
    with client.responses.stream(input=QUESTION, **asked) as stream:
        told = [event.input for event in stream if event.type == "response.custom_tool_call_input.done"]
    assert told == [call.input]
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        model=DEMO_ALIAS, input=[result], previous_response_id=first.id, max_output_tokens=20
    )
    assert second.output


PATCH = """
start: begin line~1..3 "*** End Patch"
begin: "*** Begin Patch" LF
line: ("+" | "-") /[a-c \\"]{1,6}/ LF
%import common.LF
"""
IS_PATCH = re.compile(r'\*\*\* Begin Patch\n([+-][a-c "]{1,6}\n){1,3}\*\*\* End Patch')


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [("lark", PATCH, IS_PATCH), ("regex", r'[a-c]{2}\n"[a-c]{1,3}"', re.compile(r'[a-c]{2}\n"[a-c]{1,3}"'))],
)
def test_the_input_of_a_custom_tool_follows_its_grammar(
    client: openai.OpenAI, syntax: str, definition: str, pattern: re.Pattern[str]
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    asked: Any = {
        "model": DEMO_ALIAS,
        "tools": [{"type": "custom", "name": "apply_patch", "description": "Edits", "format": form}, WEATHER],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
    }
    calls = []
    for seed in range(4):
        with client.responses.stream(input="Edit it.", extra_body={"seed": seed}, temperature=1.2, **asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        [call] = final.output
        assert isinstance(call, ResponseCustomToolCall)
        assert pattern.fullmatch(call.input), call.input
        deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == call.input
        assert len(deltas) > 1
        calls.append(call)
    result: Any = {"type": "custom_tool_call_output", "call_id": calls[0].call_id, "output": "done"}
    said: Any = [{"role": "user", "content": "Edit it."}, calls[0].to_dict(), result]
    assert client.responses.create(model=DEMO_ALIAS, input=said, tools=asked["tools"], max_output_tokens=20).output


def test_a_custom_tool_in_a_chat(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r'[a-c]{2}\n"[a-c]{1,3}"'}}
    asked: Any = {
        "model": DEMO_ALIAS,
        "messages": [{"role": "user", "content": "Edit it."}],
        "tools": [{"type": "custom", "custom": {"name": "apply_patch", "format": form}}],
        "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}},
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 400,
    }
    message = client.chat.completions.create(**asked).choices[0].message
    [call] = message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert re.fullmatch(r'[a-c]{2}\n"[a-c]{1,3}"', call.custom.input)
    told = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.index == 0
            told += (delta.model_extra or {})["custom"]["input"]
    assert told == call.custom.input
    asked["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(**{**asked, "tool_choice": "auto", "max_tokens": 20}).choices


def test_a_tool_call_and_its_result(client: openai.OpenAI) -> None:
    first = client.responses.create(model=DEMO_ALIAS, input=QUESTION, tools=[WEATHER], temperature=0)
    [call] = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: ResponseInputParam = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    ]
    second = client.responses.create(
        model=DEMO_ALIAS, input=result, previous_response_id=first.id, tools=[WEATHER], temperature=0
    )
    assert second.output_text
    items: Any = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in first.output], *result]
    spelled = client.responses.create(model=DEMO_ALIAS, input=items, tools=[WEATHER], temperature=0)
    assert spelled.output_text == second.output_text


def test_a_streamed_tool_call_is_the_whole_one(client: openai.OpenAI) -> None:
    with client.responses.stream(model=DEMO_ALIAS, input=QUESTION, tools=[WEATHER], temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    [call] = [item for item in final.output if item.type == "function_call"]
    assert "".join(deltas) == call.arguments
    assert json.loads(call.arguments) == {"city": "Paris"}


def test_every_event_of_a_stream(client: openai.OpenAI) -> None:
    for parameters in ({}, {"tools": [WEATHER]}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}):
        arguments: Any = {"input": QUESTION, "temperature": 0, "max_output_tokens": 20, **parameters}
        for event in client.responses.create(model=DEMO_ALIAS, stream=True, **arguments):
            if event.type.startswith("response.output_text") or event.type == "response.created":
                check("ResponseStreamEvent", event.model_dump(exclude_unset=True))
            elif hasattr(event, "response"):
                check("Response", event.response.model_dump(exclude_unset=True))


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=DEMO_ALIAS, input="Order something.", text_format=Order, temperature=1)
    assert isinstance(parsed.output_parsed, Order)
    with client.responses.stream(model=DEMO_ALIAS, input="Order something.", text_format=Order) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Order)


def test_log_probabilities(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=DEMO_ALIAS, input="Who are you?", temperature=0, include=["message.output_text.logprobs"], top_logprobs=3
    )
    [message] = [item for item in response.output if item.type == "message"]
    [part] = [part for part in message.content if part.type == "output_text"]
    assert part.logprobs
    assert b"".join(bytes(one.bytes) for one in part.logprobs).decode() == part.text
    assert all(len(one.top_logprobs) == 3 for one in part.logprobs)


async def test_async(demo_stack: Stack) -> None:
    url = f"{demo_stack.gateways[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=demo_stack.key, max_retries=0) as client:
        whole = await client.responses.create(model=DEMO_ALIAS, input="Who are you?", temperature=0)
        async with client.responses.stream(model=DEMO_ALIAS, input="Who are you?", temperature=0) as stream:
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        parsed = await client.responses.parse(model=DEMO_ALIAS, input="Order.", text_format=Order)
        assert isinstance(parsed.output_parsed, Order)
        background = await client.responses.create(model=DEMO_ALIAS, input="Who are you?", background=True)
        stream_again = await client.responses.retrieve(background.id, stream=True)
        kinds = [event.type async for event in stream_again]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert (await client.responses.retrieve(background.id)).status == "completed"
        assert [item async for item in client.responses.input_items.list(background.id)]
        await client.responses.delete(background.id)


def test_what_is_refused(client: openai.OpenAI) -> None:
    search: Any = {"type": "web_search"}
    with pytest.raises(openai.BadRequestError, match="no tools of its own"):
        client.responses.create(model=DEMO_ALIAS, input="x", tools=[search])
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens"):
        client.responses.create(model=DEMO_ALIAS, input="word " * 4000)


def final_of(connection: ResponsesConnection, **request: Any) -> Response:
    """The response to one request over WebSocket, put together from its events."""
    event: Any = {"type": "response.create", "model": DEMO_ALIAS, "temperature": 0, "store": False, **request}
    connection.send(event)
    text = ""
    for event in connection:
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            assert event.response.output_text == text
            response: Response = event.response
            return response
        assert event.type != "error", event
    raise AssertionError("the connection closed")


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_warming_up_over_a_websocket(kinds_stack: Stack) -> None:
    """With one worker for the model: of two that have nothing to do, the gateway takes either."""
    url = f"{kinds_stack.gateways[0].url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key=kinds_stack.key, max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        long = "Rules: " + "be kind, be brief, be true; " * 20
        warm = final_of(connection, input=long, generate=False)
        assert (warm.output, warm.status) == ([], "completed")
        assert warm.usage is not None
        response = final_of(connection, input="Who are you?", previous_response_id=warm.id)
    assert response.output_text
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens > warm.usage.input_tokens - 10


# The helper opens its connection in a way that `websockets` advises against since 17.1.
@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_tool_calls_over_a_websocket(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    with client.responses.connect() as connection:
        first = final_of(connection, input=QUESTION, tools=tools)
        [call] = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
        assert json.loads(call.arguments) == {"city": "Paris"}
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}]
        second = final_of(connection, input=result, previous_response_id=first.id, tools=tools)
    items: Any = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in first.output], *result]
    spelled = client.responses.create(model=DEMO_ALIAS, input=items, tools=tools, temperature=0)
    assert second.output_text == spelled.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


async def test_the_async_helper_of_a_websocket(demo_stack: Stack) -> None:
    url = f"{demo_stack.gateways[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=demo_stack.key, max_retries=0) as client:
        whole = await client.responses.create(model=DEMO_ALIAS, input="Who are you?", temperature=0)
        async with client.responses.connect() as connection:
            await connection.send({"type": "response.create", "model": DEMO_ALIAS, "input": "x", "top_p": 7})
            refused = await connection.recv()
            assert isinstance(refused, ResponseWsError)
            assert (refused.status, refused.error.param) == (400, "top_p")
            request: Any = {"type": "response.create", "model": DEMO_ALIAS, "input": "Who are you?", "temperature": 0}
            await connection.send(request)
            event: Any
            async for event in connection:
                if event.type == "response.completed":
                    assert event.response.output_text == whole.output_text
                    break
        kept = await client.responses.retrieve(event.response.id)
        assert kept.output_text == whole.output_text
