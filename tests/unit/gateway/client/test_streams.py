"""Streamed answers: items as they come, errors in the stream, leaving early, and going on after a broken connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.client import (
    AsyncClient,
    AsyncStream,
    ChatChunk,
    Client,
    ContextOverflow,
    RateLimited,
    ServerError,
    StopType,
    Stream,
    StreamBroken,
    StreamGone,
    Timeout,
    Unavailable,
    UnexpectedAnswer,
)
from gateway.client.errors import ConnectionFailed
from gateway.client.receiver import StreamReceiver
from gateway.client.request import StreamRequest
from tests.support.scripted_server import Reply, ScriptedServer, stream

DONE = "data: [DONE]\n\n"
HI = [{"role": "user", "content": "hi"}]


def chunk(text: str, number: int | None = None, **more: Any) -> str:
    """One event of a chat; with an id where it has a number."""
    document = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, **more}]}
    return (f"id: b-{number}\n" if number is not None else "") + f"data: {json.dumps(document)}\n\n"


def error(type: str, **more: Any) -> str:
    return f"data: {json.dumps({'error': {'message': 'why', 'type': type, **more}})}\n\n"


def keep(kept: list[str], answer: Stream[ChatChunk]) -> None:
    """Appends what comes, so that it is there when an error follows."""
    kept.extend(item.text for item in answer)


async def keep_async(kept: list[str], answer: AsyncStream[ChatChunk]) -> None:
    async for item in answer:
        kept.append(item.text)  # noqa: PERF401 - a comprehension would lose what came before the error


def test_items_as_they_come(server: ScriptedServer, client: Client) -> None:
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 3}, "timings": {"predicted_n": 2}}\n\n'
    thought = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "reasoning_content": "hm"}}]}\n\n'
    server.streams(": ping\n\n", thought, chunk("Hel"), chunk("lo")[:20], chunk("lo")[20:] + usage, DONE)
    with client.chat.completions.create(HI, stream=True, model="m", stream_options={"include_usage": True}) as answer:
        items = list(answer)
    assert "".join(item.text for item in items) == "Hello"
    assert items[0].reasoning == "hm"
    assert items[-1].usage is not None
    assert items[-1].usage.prompt_tokens == 3
    assert server.asked[0].json["stream"] is True
    assert server.asked[0].headers["accept"] == "text/event-stream"
    assert "x-resume-grace" not in server.asked[0].headers


def test_a_native_stream_ends_with_its_last_item(server: ScriptedServer, client: Client) -> None:
    progress = {"total": 9, "cache": 0, "processed": 4, "time_ms": 1}
    server.streams(
        f'data: {{"content": "", "stop": false, "prompt_progress": {json.dumps(progress)}}}\n\n',
        'data: {"content": " a", "tokens": [5], "stop": false}\n\n',
        'data: {"content": "", "stop": true, "stop_type": "limit", "tokens_predicted": 1}\n\n',
    )
    items = list(client.complete("x", stream=True, return_progress=True))
    assert [item.content for item in items] == ["", " a", ""]
    assert items[0].prompt_progress is not None
    assert items[0].prompt_progress.total == 9
    assert items[-1].stop_type is StopType.LIMIT


async def test_tasks(server: ScriptedServer, async_client: AsyncClient) -> None:
    server.streams(chunk("Hel"), chunk("lo"), DONE)
    answer = await async_client.chat.completions.create(HI, stream=True)
    first = await anext(answer)
    assert [first.text] + [item.text async for item in answer] == ["Hel", "lo"]
    with pytest.raises(StopAsyncIteration):
        await anext(answer)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (error("server_error", code=500), ServerError),
        (error("exceed_context_size_error", code=400, n_ctx=5), ContextOverflow),
        (error("rate_limit_error"), RateLimited),
        (error("unavailable_error", code="worker_lost"), Unavailable),
    ],
)
async def test_an_error_in_the_stream_comes_after_what_came_before_it(
    server: ScriptedServer, client: Client, async_client: AsyncClient, event: str, kind: type[Exception]
) -> None:
    server.streams(chunk("Hel") + chunk("lo") + event + DONE, headers={"x-request-id": "req-7"})
    texts: list[str] = []
    with pytest.raises(kind, match=r"why \(request req-7\)") as caught:
        keep(texts, client.chat.completions.create(HI, stream=True, resume_grace=5))
    assert type(caught.value) is kind
    async_texts: list[str] = []
    with pytest.raises(kind):
        await keep_async(async_texts, await async_client.chat.completions.create(HI, stream=True))
    assert texts == async_texts == ["Hel", "lo"]
    assert len(server.asked) == 2


def test_words_that_look_like_an_error_are_text(server: ScriptedServer, client: Client) -> None:
    server.streams(chunk('{"error": {"message": "x"}}'), DONE)
    (item,) = client.chat.completions.create(HI, stream=True)
    assert item.text == '{"error": {"message": "x"}}'


def test_an_item_of_another_shape(server: ScriptedServer, client: Client) -> None:
    server.streams('data: {"choices": 5}\n\n', DONE)
    with pytest.raises(UnexpectedAnswer, match="choices"):
        list(client.chat.completions.create(HI, stream=True))


@pytest.mark.parametrize("manner", ["close", "with", "loop"])
def test_leaving_early_closes_the_connection(server: ScriptedServer, client: Client, manner: str) -> None:
    server.streams(chunk("Hel"), ending="open")
    answer = client.chat.completions.create(HI, stream=True)
    if manner == "close":
        assert next(answer).text == "Hel"
        answer.close()
    elif manner == "with":
        with answer:
            next(answer)
    else:
        for _ in answer:
            break
    assert server.left.wait(5)
    assert list(answer) == []


@pytest.mark.parametrize("manner", ["with", "loop", "cancelled"])
async def test_leaving_early_in_a_task(server: ScriptedServer, async_client: AsyncClient, manner: str) -> None:
    server.streams(chunk("Hel"), ending="open")
    answer = await async_client.chat.completions.create(HI, stream=True)
    if manner == "with":
        async with answer:
            assert (await anext(answer)).text == "Hel"
    elif manner == "loop":
        async for _ in answer:
            break
    else:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep_async([], answer), 0.1)
    assert await asyncio.to_thread(server.left.wait, 5)


@pytest.mark.parametrize("ending", ["cut", "whole"])
async def test_a_stream_that_breaks_says_so(
    server: ScriptedServer, client: Client, async_client: AsyncClient, ending: Any
) -> None:
    server.streams(chunk("Hel", 1), ending=ending)
    texts: list[str] = []
    with pytest.raises(StreamBroken, match="resume_grace lets a stream go on"):
        keep(texts, client.chat.completions.create(HI, stream=True))
    with pytest.raises(StreamBroken):
        await keep_async(texts, await async_client.chat.completions.create(HI, stream=True))
    assert texts == ["Hel", "Hel"]
    assert len(server.asked) == 2


def test_a_silent_stream_breaks(server: ScriptedServer) -> None:
    server.streams(chunk("Hel", 1), ending="open")
    with Client(server.url, timeout=0.1) as client, pytest.raises(StreamBroken) as caught:
        list(client.chat.completions.create(HI, stream=True))
    assert isinstance(caught.value.__cause__, Timeout)


BROKEN_OFTEN = [
    stream(chunk("a", 1), chunk("b", 2) + chunk("c", 3)[:25], ending="cut"),
    Reply(b"", 503),
    stream(chunk("c", 3), ending="whole"),
    stream(ending="cut"),
    stream(": ping\n\n", chunk("d", 4), DONE),
]
IDS = [None, "b-2", "b-2", "b-3", "b-3"]


async def test_going_on_loses_and_doubles_nothing(
    server: ScriptedServer, client: Client, async_client: AsyncClient
) -> None:
    server.replies = [*BROKEN_OFTEN]
    answer = client.chat.completions.create(HI, stream=True, resume_grace=5, seed=1)
    assert "".join(item.text for item in answer) == "abcd"
    server.replies = [*BROKEN_OFTEN]
    answer_of_tasks = await async_client.chat.completions.create(HI, stream=True, resume_grace=5, seed=1)
    assert "".join([item.text async for item in answer_of_tasks]) == "abcd"
    assert [asked.headers.get("last-event-id") for asked in server.asked] == IDS * 2
    assert {asked.headers["x-resume-grace"] for asked in server.asked} == {"5"}
    assert len({(asked.path, asked.body) for asked in server.asked}) == 1


@pytest.mark.parametrize("code", ["stream_gone", 404])
def test_a_stream_that_the_server_has_given_up(server: ScriptedServer, client: Client, code: str | int) -> None:
    gone = {"error": {"message": "gone", "type": "not_found_error", "code": code}}
    server.replies = [stream(chunk("a", 1), ending="cut"), Reply(json.dumps(gone).encode(), 404)]
    texts: list[str] = []
    with pytest.raises(StreamGone, match="gone") as caught:
        keep(texts, client.chat.completions.create(HI, stream=True, resume_grace=60))
    assert isinstance(caught.value, StreamBroken)
    assert texts == ["a"]
    assert len(server.asked) == 2


def test_without_an_id_there_is_nothing_to_go_on_from(server: ScriptedServer, client: Client) -> None:
    server.streams(chunk("a"), ending="cut")
    with pytest.raises(StreamBroken, match="no event with an id"):
        list(client.chat.completions.create(HI, stream=True, resume_grace=5))


def test_the_pauses_grow_and_end_with_the_grace() -> None:
    now = 100.0
    request = StreamRequest("/x", b"", lambda data: data, lambda _: False, resume_grace=5)
    receiver = StreamReceiver(request, clock=lambda: now)
    broken = ConnectionFailed("cut")
    list(receiver.feed(b"id: 1\ndata: a\n\n"))
    for expected in (0.1, 0.2, 0.4, 0.8, 1.6):
        assert receiver.pause_s(broken) == expected
        now += expected
    with pytest.raises(StreamBroken, match="within 5 s"):
        receiver.pause_s(broken)
    list(receiver.feed(b"id: 2\ndata: b\n\n"))
    assert receiver.pause_s(broken) == 0.1, "something came, so it begins anew"


@pytest.mark.parametrize("grace", [0, 61, -5])
def test_a_grace_out_of_bounds(client: Client, grace: int) -> None:
    with pytest.raises(ValueError, match="takes 1 to 60 seconds"):
        client.complete("x", stream=True, resume_grace=grace)
