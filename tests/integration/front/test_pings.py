"""What keeps a waiting stream alive, for a client that takes each piece of the network for an event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack

PING_S = 0.2
BUSY_TOKENS = 60
MODEL = "narrow-door"
"""One slot, which another call has for more than a second."""
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/completion": {"prompt": "hi"},
}


@pytest.fixture(scope="module")
def patient(stack: Stack) -> Iterator[Process]:
    """A gateway whose pings are events."""
    worker = stack.fake_worker(MODEL, "--step-ms", "20", "--tokens", "100", slots=1)
    process = stack.gateway(ping="event", ping_interval_s=PING_S)
    yield process
    for one, those in ((process, stack.gateways), (worker, stack.workers)):
        one.stop()
        those.remove(one)


@pytest.fixture
async def blogger(stack: Stack, patient: Process) -> AsyncIterator[Caller]:
    async with calling(patient.url, stack.key, MODEL) as asking:
        yield asking


async def pieces(caller: Caller, path: str) -> list[bytes]:
    """Return the pieces of a stream that waits for the only slot, as the network brings them."""
    async with caller.stream(max_tokens=BUSY_TOKENS) as first:
        await first.until_text()
        body = {"model": MODEL, "stream": True, "max_tokens": 3, **ASKED[path]}
        async with caller.session.post(caller.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return [piece async for piece, _ in response.content.iter_chunks()]


def events(pieces: list[bytes]) -> list[dict[str, Any]]:
    """Return what a client reads that skips lines of other fields and parses all the rest."""
    lines = [line for line in b"".join(pieces).decode().split("\n") if line and not line.startswith("event: ")]
    assert all(line.startswith("data: ") for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


async def test_a_loop_over_chunks_of_the_network_is_served_behind_a_queue(blogger: Caller) -> None:
    """The program of docs/clients.md: one chunk is one event, and nothing looks for comments."""
    said, num_waits = "", 0
    for chunk in await pieces(blogger, "/v1/chat/completions"):
        if chunk.strip() == b"data: [DONE]":
            break
        delta = json.loads(chunk.decode().removeprefix("data: "))["choices"][0]["delta"]
        num_waits += delta == {}
        said += delta.get("content", "")
    assert said == "t0 t1 t2 "
    assert num_waits >= 3, "pings while it waited, and the last chunk"


async def test_completions(blogger: Caller) -> None:
    told = events(await pieces(blogger, "/v1/completions"))
    texts = [one["choices"][0]["text"] for one in told]
    assert texts[:2] == ["", ""]
    assert "".join(texts) == "t0 t1 t2 "
    assert len({one["id"] for one in told}) == 1


async def test_llama_servers_completion(blogger: Caller) -> None:
    told = events(await pieces(blogger, "/completion"))
    assert [(one["content"], one["stop"]) for one in told[:2]] == [("", False)] * 2
    assert "".join(one["content"] for one in told) == "t0 t1 t2 "
    assert [one["stop"] for one in told].index(True) == len(told) - 1


async def test_messages(blogger: Caller) -> None:
    told = events(await pieces(blogger, "/v1/messages"))
    assert told[:2] == [{"type": "ping"}] * 2
    assert next(one for one in told if one["type"] != "ping")["type"] == "message_start"
    assert told[-1]["type"] == "message_stop"


async def test_responses(blogger: Caller) -> None:
    told = events(await pieces(blogger, "/v1/responses"))
    assert [one["type"] for one in told[:3]] == ["response.created", "response.queued", "response.queued"]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert [one["type"] for one in told].count("response.created") == 1
    assert told[0]["response"]["status"] == "queued"
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["id"] == told[0]["response"]["id"]


async def test_by_default_pings_are_comments(stack: Stack, patient: Process) -> None:
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        told = b"".join(await pieces(caller, "/v1/chat/completions"))
    assert told.startswith(b": waiting position=1")
