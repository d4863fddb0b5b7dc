"""The benchmark of dialects: what it asks is understood, it knows the end of each stream, and it judges by the bar."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks import large_request
from benchmarks.dialects import ANSWERS, CHAT, COMPLETIONS, MESSAGES, NATIVE, PLAIN, WAYS, Way, rows_of
from benchmarks.load import Answer, Reader
from gateway.api.anthropic.request import read_messages_request
from gateway.api.native.request import read_completion
from gateway.api.openai.requests import read_chat
from gateway.api.openai.requests import read_completion as read_openai_completion
from workers.protocol.requests import GenerateRequest


def requests_of(way: Way) -> tuple[GenerateRequest, ...]:
    raw = json.dumps(way.body()).encode()
    if way.path == CHAT:
        return read_chat(raw).requests
    if way.path == COMPLETIONS:
        return read_openai_completion(raw).requests
    if way.path == MESSAGES:
        return read_messages_request(raw).requests
    return read_completion(raw, {"type": "http", "query_string": b""}).requests


@pytest.mark.parametrize(
    "way", [way for way in (PLAIN, *WAYS) if "responses" not in way.path], ids=lambda way: way.name
)
def test_each_way_asks_for_what_it_says(way: Way) -> None:
    asked = requests_of(way)
    assert len(asked) == way.n
    assert ANSWERS % way.n == 0
    assert [bool(one.tools) for one in asked] == [way.model == "calls"] * way.n
    assert all(bool(one.n_probs) == ("prob" in way.name) for one in asked)
    assert way.path != NATIVE or ("timings" in asked[0].tell) == ("timings" in way.name)


@pytest.mark.parametrize(
    ("last_words", "tokens"),
    [
        (b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n', 7),
        (b'data: {"usage":{"output_tokens":7}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n', 7),
        (b'event: response.completed\ndata: {"response":{"error":null,"usage":{"output_tokens":7}}}\n\n', 7),
        (b'data: {"index":0,"content":"","stop":true,"tokens_predicted":7}\n\n', 7),
        (b'data: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n', 0),
        (b'data: {"usage":{"completion_tokens":7}}\n\n', 0),
    ],
)
async def test_a_stream_is_good_when_its_end_has_come(last_words: bytes, tokens: int) -> None:
    reader = Reader(answer=Answer(sent=0.0), done=asyncio.get_running_loop().create_future())
    reader.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    reader.data_received(last_words + b"\r\n0\r\n\r\n")
    assert reader.done is not None
    assert reader.done.done()
    assert reader.answer is not None
    assert (reader.answer.tokens if not reader.answer.error else 0) == tokens


def test_the_bar_is_held_against_chat_of_the_same_time() -> None:
    near, far = [(24.0, 20.0), (45.0, 40.0), (33.0, 30.0)], [(26.0, 20.0), (47.0, 40.0), (90.0, 30.0)]
    assert [(row.what, row.ratio, row.reached) for row in rows_of({"near": near, "far": far})] == [
        (PLAIN.name, "20.0 to 40.0", True),
        ("near", "+4.0 us", True),
        ("far", "+7.0 us", False),
    ]


def test_the_large_request_is_the_same_in_three_dialects() -> None:
    chat = large_request.chat()
    asked = read_chat(json.dumps({"model": "m", **chat}).encode()).requests[0]
    body = {"model": "m", "max_tokens": 1, **large_request.anthropic(chat)}
    same = read_messages_request(json.dumps(body).encode()).requests[0]
    assert (len(asked.tools), len(asked.messages)) == (large_request.TOOLS, large_request.MESSAGES)
    assert same.tools == asked.tools
    assert [(one.role, one.content or "") for one in same.messages] == [
        (one.role, one.content or "") for one in asked.messages
    ]
    assert len(large_request.responses(chat)["input"]) == large_request.MESSAGES
