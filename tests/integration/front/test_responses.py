"""The Responses API through real gateways: stored, continued, deleted, in the background; one team, any gateway."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import pytest
import redis
from openai import APIStatusError, APITimeoutError, AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError

from gateway.resume.recording import MAX_OF_STREAM
from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller
from tests.support.openai_schema import check
from tests.support.stack import Process, Stack
from tests.support.waiting import until

EIGHT = "t0 t1 t2 t3 t4 t5 t6 t7 "


def story(tokens: int) -> str:
    return "".join(f"t{n} " for n in range(tokens))


def client_of(gateway: Process, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """Asks the first gateway."""
    async with client_of(stack.gateways[0], stack.key) as asking:
        yield asking


@pytest.fixture
async def other(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """Asks the second gateway."""
    async with client_of(stack.gateways[1], stack.key) as asking:
        yield asking


@pytest.fixture
async def stranger(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """Of another team."""
    async with client_of(stack.gateways[0], NARROW_KEY) as asking:
        yield asking


async def test_whole(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="quick", input="hi")
    check("Response", response.model_dump(exclude_unset=True))
    assert (response.output_text, response.status) == (EIGHT, "completed")
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.output_tokens_details.reasoning_tokens) == (8, 0)


async def test_cut(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="quick", input="hi", max_output_tokens=3)
    assert (response.output_text, response.status) == ("t0 t1 t2 ", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_streamed(client: AsyncOpenAI) -> None:
    text, kinds = "", []
    async for event in await client.responses.create(model="quick", input="hi", stream=True):
        check("ResponseStreamEvent", event.model_dump(exclude_unset=True))
        kinds.append(event.type)
        assert event.sequence_number == len(kinds) - 1
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == EIGHT
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"


async def test_a_stored_response_is_found_at_every_gateway(client: AsyncOpenAI, other: AsyncOpenAI) -> None:
    response = await client.responses.create(model="quick", input="hi", metadata={"a": "b"})
    found = await other.responses.retrieve(response.id)
    assert found.model_dump() == response.model_dump()
    await client.responses.delete(response.id)
    for asking in (client, other):
        with pytest.raises(NotFoundError, match="no response"):
            await asking.responses.retrieve(response.id)
    with pytest.raises(NotFoundError):
        await client.responses.delete(response.id)


async def test_without_v1_a_response_is_asked_for_found_cancelled_and_deleted(stack: Stack) -> None:
    gateway = stack.gateways[0]
    async with (
        AsyncOpenAI(base_url=gateway.url, api_key=stack.key, max_retries=0) as bare,
        client_of(gateway, stack.key) as usual,
    ):
        first = await bare.responses.create(model="quick", input="hi")
        assert await bare.responses.retrieve(first.id) == await usual.responses.retrieve(first.id)
        more = await bare.responses.create(model="quick", input="go on", previous_response_id=first.id)
        assert (await bare.responses.input_items.list(more.id)).data[0].type == "message"
        counted = await bare.responses.input_tokens.count(model="quick", input="hi")
        assert counted == await usual.responses.input_tokens.count(model="quick", input="hi")
        running = await bare.responses.create(model="slow", input="hi", background=True)
        assert (await bare.responses.cancel(running.id)).status == "cancelled"
        async with bare.responses.connect() as connection:
            await connection.send({"type": "response.create", "model": "quick", "input": "hi", "store": False})
            kinds = [event.type async for event in until_completed(connection)]
        assert kinds[-1] == "response.completed"
        await bare.responses.delete(first.id)
        for asking in (bare, usual):
            with pytest.raises(NotFoundError, match="no response"):
                await asking.responses.retrieve(first.id)


async def until_completed(events: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for event in events:
        yield event
        if event.type == "response.completed":
            return


async def test_nothing_is_kept_where_nothing_is_to_be_kept(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="quick", input="hi", store=False)
    assert response.model_dump()["store"] is False
    with pytest.raises(NotFoundError):
        await client.responses.retrieve(response.id)


async def test_another_team_knows_nothing_of_it(client: AsyncOpenAI, stranger: AsyncOpenAI) -> None:
    response = await client.responses.create(model="quick", input="hi")
    asking = stranger.responses
    with pytest.raises(BadRequestError, match="no response"):
        await asking.create(model="quick", input="x", previous_response_id=response.id)
    for call in (
        asking.retrieve(response.id),
        asking.delete(response.id),
        asking.cancel(response.id),
        asking.create(model="quick", input=[{"type": "item_reference", "id": response.output[0].id or ""}]),
    ):
        with pytest.raises(NotFoundError):
            await call
    with pytest.raises(NotFoundError):
        await asking.input_items.list(response.id)
    assert (await client.responses.retrieve(response.id)).id == response.id


async def test_a_conversation_goes_on_from_a_response(client: AsyncOpenAI, other: AsyncOpenAI) -> None:
    first = await client.responses.create(model="quick", input="hi")
    stream = await other.responses.create(model="quick", input="and", previous_response_id=first.id, stream=True)
    *_, last = [event async for event in stream]
    assert last.type == "response.completed"
    second = last.response
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    third = await client.responses.create(model="quick", input="more", previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens + 8
    assert third.previous_response_id == second.id
    await client.responses.delete(first.id)
    with pytest.raises(BadRequestError) as caught:
        await client.responses.create(model="quick", input="x", previous_response_id=third.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_input_items(client: AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": f"message {n}"} for n in range(5)]
    items.append({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"})
    items.append({"type": "function_call_output", "call_id": "c", "output": "done"})
    response = await client.responses.create(model="slow", input=items, max_output_tokens=1)
    listed = [item async for item in client.responses.input_items.list(response.id, limit=3, order="asc")]
    assert [item.type for item in listed] == ["message"] * 5 + ["function_call", "function_call_output"]
    page = await client.responses.input_items.list(response.id)
    check("ResponseItemList", page.model_dump(exclude_unset=True))
    assert [item.id for item in page.data] == [item.id for item in reversed(listed)]
    assert not page.has_more


@pytest.mark.parametrize("limit", ["0", "101", "--5", "\u00b2", "\u0663", "1e1", "-", "9" * 400])
async def test_what_is_no_number_is_refused(client: AsyncOpenAI, limit: str) -> None:
    response = await client.responses.create(model="quick", input="hi")
    with pytest.raises(BadRequestError, match="limit"):
        await client.responses.input_items.list(response.id, extra_query={"limit": limit})


async def test_tokens_are_counted_without_an_answer(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="quick", input="hi")
    arguments: Any = {"model": "quick", "input": "and you?", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**arguments)
    response = await client.responses.create(**arguments)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


async def test_a_conversation_that_is_too_long_loses_its_first_turns(client: AsyncOpenAI) -> None:
    turns = [[{"role": "user", "content": f"u{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(9)]
    items: Any = [{"role": "system", "content": "rules"}, *(item for turn in turns for item in turn)]
    items.append({"role": "user", "content": "last"})
    with pytest.raises(BadRequestError, match="tokens"):
        await client.responses.create(model="quick", input=items)
    response = await client.responses.create(model="quick", input=items, truncation="auto", max_output_tokens=8)
    assert response.usage is not None
    assert 20 < response.usage.input_tokens <= 56
    with pytest.raises(BadRequestError, match="tokens"):
        await client.responses.create(model="quick", input="x" * 400, truncation="auto")


async def test_a_client_that_leaves_while_its_turns_are_counted_waits_no_more(stack: Stack) -> None:
    """A crowd that had left was counted for, one after the other, for a minute, and held what it had sent."""
    gateway, worker = stack.gateways[0], stack.fake_worker("frozen")
    try:
        async with client_of(gateway, stack.key) as asking:
            async with asyncio.timeout(10):
                while "frozen" not in {one.id async for one in asking.models.list()}:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            worker.signal(signal.SIGSTOP)
            left: Any = {"timeout": 0.5, "extra_headers": {"x-request-id": "left-early"}}
            with pytest.raises(APITimeoutError):
                await asking.responses.create(model="frozen", input="hi", truncation="auto", **left)
        await until(lambda: bool(re.search(r'"left-early".*"client_gone"', gateway.text())), 10.0, "its call is over")
    finally:
        worker.signal(signal.SIGCONT)
        worker.kill()
        stack.workers.remove(worker)


async def test_in_the_background(client: AsyncOpenAI, other: AsyncOpenAI, stack: Stack) -> None:
    response = await client.responses.create(model="slow", input="hi", background=True, max_output_tokens=40)
    check("Response", response.model_dump(exclude_unset=True))
    assert response.status == "queued"
    seen: list[str | None] = [response.status]
    while seen[-1] in ("queued", "in_progress"):
        await asyncio.sleep(0.1)
        response = await other.responses.retrieve(response.id)
        seen.append(response.status)
    assert "in_progress" in seen
    assert (response.status, response.output_text) == ("incomplete", story(40))
    await until(lambda: stack.leases("slow") == 0, 1.0, "the slot is free")


async def test_what_does_not_fit_into_the_store_is_not_begun_in_the_background(stack: Stack) -> None:
    gateway = stack.gateway(responses_bytes_per_team=4096, max_body_bytes=1 << 20)
    try:
        async with client_of(gateway, stack.key) as asking:
            with pytest.raises(APIStatusError) as full:
                await asking.responses.create(model="quick", input="word " * 2000, background=True)
            assert (full.value.status_code, full.value.code) == (503, "storage_full")
            assert "Send less, or send it without `background`." in full.value.message
            assert (await asking.responses.create(model="quick", input="hi", background=True)).status == "queued"
    finally:
        gateway.stop()
        stack.gateways.remove(gateway)


async def test_a_background_stream_is_taken_up_anywhere(client: AsyncOpenAI, other: AsyncOpenAI, stack: Stack) -> None:
    stream = await client.responses.create(model="slow", input="hi", background=True, stream=True, max_output_tokens=40)
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if event.sequence_number == 10:
            break
    await stream.close()
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    id_ = events[0].response.id
    for asking, count in ((other, 12), (client, None)):
        after = events[-1].sequence_number
        again = await asking.responses.retrieve(id_, stream=True, starting_after=after)
        async for event in again:
            events.append(event)
            if count is not None and len(events) > count + after:
                break
        await again.close()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == story(40)
    assert events[-1].type == "response.incomplete"
    whole = [event async for event in await other.responses.retrieve(id_, stream=True)]
    assert [event.model_dump() for event in whole] == [event.model_dump() for event in events]
    await until(lambda: stack.leases("slow") == 0, 1.0, "the slot is free")


async def test_pings_amid_events_with_ids_are_no_events(client: AsyncOpenAI, caller: Caller) -> None:
    """OpenAI's client took a comment behind an event with an id for an event without data, and failed."""
    async with caller.stream(model="slow", max_tokens=60) as one, caller.stream(model="slow", max_tokens=60) as two:
        await asyncio.gather(one.until_text(), two.until_text())
        stream = await client.responses.create(
            model="slow", input="hi", background=True, stream=True, max_output_tokens=3
        )
        events = [event async for event in stream]
    assert [event.type for event in events[:2]] == ["response.created", "response.queued"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_background_stream_has_so_many_readers(
    client: AsyncOpenAI, other: AsyncOpenAI, elsewhere: bool
) -> None:
    asking = other if elsewhere else client
    id_ = (await client.responses.create(model="slow", input="hi", background=True, max_output_tokens=400)).id
    readers = [await asking.responses.retrieve(id_, stream=True) for _ in range(MAX_OF_STREAM)]
    with pytest.raises(RateLimitError) as refused:
        await asking.responses.retrieve(id_, stream=True)
    assert refused.value.code == "too_many_requests"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert f"{MAX_OF_STREAM} connections read this stream" in refused.value.message
    await readers.pop().close()
    async with asyncio.timeout(5):
        while len(readers) < MAX_OF_STREAM:
            try:
                readers.append(await asking.responses.retrieve(id_, stream=True))
            except RateLimitError:
                await asyncio.sleep(0.05)
    for reader in readers:
        assert (await anext(aiter(reader))).type == "response.created"
        await reader.close()
    await client.responses.cancel(id_)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_cancelled(client: AsyncOpenAI, other: AsyncOpenAI, stack: Stack, elsewhere: bool) -> None:
    response = await client.responses.create(model="slow", input="hi", background=True)
    await until(lambda: stack.leases("slow") == 1, 2.0, "it runs")
    await asyncio.sleep(0.2)
    cancelled = await (other if elsewhere else client).responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    await until(lambda: stack.leases("slow") == 0, 0.5, "the slot is free")
    found = await client.responses.retrieve(response.id)
    assert found.status == "cancelled"
    assert found.output_text.startswith("t0 t1 ")
    assert (await client.responses.cancel(response.id)).status == "cancelled"


async def test_whoever_cancels_does_not_read_the_response_again_and_again(
    client: AsyncOpenAI, other: AsyncOpenAI, stack: Stack
) -> None:
    """At another gateway that takes a second, and a response is as large as what it was asked."""
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as store:

        def loads() -> int:
            return int(dict(store.info("commandstats")).get("cmdstat_mget", {}).get("calls", 0))

        response = await client.responses.create(model="slow", input="hi", background=True)
        await until(lambda: stack.leases("slow") == 1, 2.0, "it runs")
        before = loads()
        assert (await other.responses.cancel(response.id)).status == "cancelled"
        assert loads() - before <= 4


async def test_deleted_while_it_runs(client: AsyncOpenAI, stack: Stack) -> None:
    response = await client.responses.create(model="slow", input="hi", background=True)
    await until(lambda: stack.leases("slow") == 1, 2.0, "it runs")
    await client.responses.delete(response.id)
    await until(lambda: stack.leases("slow") == 0, 1.0, "the slot is free")
    await asyncio.sleep(0.1)
    with pytest.raises(NotFoundError):
        await client.responses.retrieve(response.id)


async def test_a_failure_in_the_background_is_kept(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="failing", input="hi", background=True)
    async with asyncio.timeout(3):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            response = await client.responses.retrieve(response.id)
    assert response.status == "failed"
    assert response.error is not None
    assert "--fail-after" in response.error.message
    check("Response", response.model_dump(exclude_unset=True))


@pytest.mark.long
async def test_a_gateway_that_dies_takes_its_responses_with_it(client: AsyncOpenAI, stack: Stack) -> None:
    doomed = stack.gateway()
    async with client_of(doomed, stack.key) as asking:
        response = await asking.responses.create(model="slow", input="hi", background=True)
        await until(lambda: stack.leases("slow") == 1, 2.0, "it runs")
    doomed.kill()
    stack.gateways.remove(doomed)
    async with asyncio.timeout(15):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.2)
            response = await client.responses.retrieve(response.id)
    assert response.status == "failed"
    assert response.error is not None
    assert "gateway" in response.error.message
    await until(lambda: stack.leases("slow") == 0, 10.0, "the slot is free")


async def test_a_foreground_stream_with_grace_is_resumed(client: AsyncOpenAI, stack: Stack) -> None:
    body = json.dumps({"model": "slow", "input": "hi", "stream": True, "max_output_tokens": 30})
    headers = {"authorization": f"Bearer {stack.key}", "content-type": "application/json", "x-resume-grace": "3"}
    raw = b""
    async with client._client.stream(
        "POST", f"{stack.gateways[0].url}/v1/responses", content=body, headers=headers
    ) as response:
        async for chunk in response.aiter_raw():
            raw += chunk
            if len(raw) > 4000:
                break
    raw = raw[: raw.rindex(b"\n\n") + 2]
    last_id = raw[raw.rindex(b"id: ") + 4 :].split(b"\n")[0].decode()
    again = await client._client.post(
        f"{stack.gateways[1].url}/v1/responses", content=body, headers={**headers, "last-event-id": last_id}
    )
    events = [json.loads(line[6:]) for line in (raw + again.content).split(b"\n") if line.startswith(b"data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == story(30)
    assert events[-1]["type"] == "response.incomplete"
    assert (await client.responses.retrieve(events[0]["response"]["id"])).output_text == story(30)


async def test_what_was_not_made_in_the_background_has_no_stream_to_take_up(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="quick", input="hi")
    with pytest.raises(Exception, match="background"):
        await client.responses.retrieve(response.id, stream=True)
    with pytest.raises(Exception, match="background"):
        await client.responses.cancel(response.id)


async def test_a_model_that_does_other_work_is_told_by_its_route(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError, match="/v1/embeddings") as caught:
        await client.responses.create(model="vectors", input="hi")
    assert caught.value.status_code == 501


async def test_an_error_has_its_status(client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        await client.responses.create(model="nobody", input="hi")
    with pytest.raises(NotFoundError, match="nobody"):
        await client.responses.create(model="nobody", input="hi", stream=True)
    with pytest.raises(Exception, match="tokens") as caught:
        await client.responses.create(model="quick", input="x" * 4000)
    assert getattr(caught.value, "code", None) == "context_length_exceeded"
