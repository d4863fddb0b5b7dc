"""The public API as a client sees it when all is well."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack

SPEC = Path(__file__).resolve().parents[3].parent / "shared" / "specs" / "openai_openapi.json"
EIGHT = "t0 t1 t2 t3 t4 t5 t6 t7 "


async def test_a_streamed_answer(caller: Caller) -> None:
    async with caller.stream() as stream:
        await stream.finish()
    assert stream.status == 200
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert stream.response.headers["x-accel-buffering"] == "no"
    assert stream.response.headers["cache-control"] == "no-cache"
    assert stream.text == EIGHT
    assert stream.finish_reason == "stop"
    assert stream.done
    assert stream.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    usage = stream.usage
    assert usage is not None
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


async def test_a_whole_answer(caller: Caller) -> None:
    status, body = await caller.whole(max_tokens=3)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "t0 t1 t2 "
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_headers_say_where_the_answer_came_from(caller: Caller) -> None:
    headers = {"x-request-id": "my-id_1"}
    async with caller.session.post(
        f"{caller.url}/v1/chat/completions", json=caller.body(), headers=headers
    ) as response:
        await response.read()
    assert response.headers["x-request-id"] == "my-id_1"
    assert response.headers["x-paddock-worker"] == "quick-a"
    assert response.headers["x-paddock-attempts"] == "1"
    assert 0 <= int(response.headers["x-paddock-slot"]) < 8
    assert float(response.headers["x-paddock-queue-ms"]) >= 0
    assert 0 <= float(response.headers["x-paddock-overhead-ms"]) < 1000


@pytest.mark.parametrize("request_id", ["x" * 129, "with space", "é"])
async def test_an_unusable_request_id_is_replaced(caller: Caller, request_id: str) -> None:
    async with caller.session.get(f"{caller.url}/health", headers={"x-request-id": request_id}) as response:
        assert response.headers["x-request-id"].startswith("req-")


async def test_llama_server_has_chat_without_v1_as_well(caller: Caller) -> None:
    async with caller.session.post(f"{caller.url}/chat/completions", json=caller.body()) as response:
        assert (response.status, (await response.json())["object"]) == (200, "chat.completion")


async def test_the_tokens_of_a_conversation_without_an_answer(caller: Caller) -> None:
    async with caller.session.post(f"{caller.url}/v1/chat/completions/input_tokens", json=caller.body()) as response:
        counted = await response.json()
    _, answer = await caller.whole()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["prompt_tokens"]}


async def test_models(caller: Caller) -> None:
    async with caller.session.get(f"{caller.url}/v1/models") as response:
        listing = await response.json()
    cards = {card["id"]: card for card in listing["data"]}
    assert {"quick", "slow"} <= set(cards)
    assert cards["quick"]["status"] == {"value": "loaded"}
    assert cards["quick"]["meta"]["n_ctx"] == 64
    assert cards["quick"]["meta"]["n_vocab"] > 0
    async with caller.session.get(f"{caller.url}/v1/models/") as response:
        assert await response.json() == listing
    async with caller.session.get(f"{caller.url}/v1/models/quick") as response:
        assert await response.json() == cards["quick"]
    if SPEC.is_file():
        components = json.loads(SPEC.read_text())["components"]
        schema = {"$ref": "#/components/schemas/ListModelsResponse", "components": components}
        jsonschema.Draft202012Validator(schema).validate(listing)


async def test_a_narrow_key_sees_its_own_models_only(gateway: Process) -> None:
    async with calling(gateway.url, NARROW_KEY, "quick") as caller:
        async with caller.session.get(f"{caller.url}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["quick"]
        assert (await caller.whole())[0] == 200
        caller.model = "slow"
        status, body = await caller.whole()
    assert (status, body["error"]["type"]) == (403, "permission_error")
    assert "Use one of: quick." in body["error"]["message"]


async def test_the_official_client(stack: Stack, gateway: Process) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=stack.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="quick", messages=messages)
        assert whole.choices[0].message.content == EIGHT
        stream = await client.chat.completions.create(model="quick", messages=messages, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == EIGHT
        assert {model.id async for model in client.models.list()} >= {"quick"}


async def test_health_ready_and_metrics_need_no_key(caller: Caller, gateway: Process) -> None:
    async with calling(gateway.url, "", "quick") as nobody:
        for path, word in (("/health", "ok"), ("/ready", "quick"), ("/metrics", "paddock_requests_total")):
            await caller.whole()
            async with nobody.session.get(gateway.url + path) as response:
                assert response.status == 200
                assert word in await response.text()


async def test_metrics_count_requests_and_tokens(caller: Caller) -> None:
    names = ("paddock_requests_total", "paddock_generated_tokens_total", "paddock_ttft_seconds_count")

    async def values(*names: str) -> list[float]:
        async with caller.session.get(f"{caller.url}/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if 'model="quick"' in line]
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in names]

    # A request is counted just after its last byte: the one before may still be on its way.
    await asyncio.sleep(0.1)
    before = await values(*names)
    await caller.whole(max_tokens=5)
    await asyncio.sleep(0.1)
    assert [b - a for a, b in zip(before, await values(*names), strict=True)] == [1, 5, 1]
    assert await values("paddock_workers", "paddock_requests_in_flight") == [1, 0]


async def test_one_log_line_per_request_and_no_prompt_or_key(caller: Caller, stack: Stack, gateway: Process) -> None:
    secret = "a-prompt-nobody-may-log"
    headers = {"x-request-id": "look-for-me"}
    body = caller.body(secret)
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
    await asyncio.sleep(0.05)
    text = gateway.text()
    lines = [json.loads(line) for line in text.splitlines() if "look-for-me" in line]
    assert len(lines) == 1
    line = lines[0]
    assert (line["status"], line["outcome"], line["alias"], line["worker"]) == (200, "ok", "quick", "quick-a")
    assert (line["team"], line["key"], line["attempts"], line["completion_tokens"]) == ("default", "first", 1, 8)
    assert line["total_ms"] >= line["ttft_ms"] > 0
    assert secret not in text
    assert stack.key not in text


async def test_a_lost_connection_to_the_worker_loses_no_token(caller: Caller) -> None:
    caller.model = "dropping"
    async with caller.stream() as stream:
        await stream.finish()
    assert stream.error is None
    assert stream.text == "".join(f"t{n} " for n in range(100))


async def test_two_gateways_share_a_pool(caller: Caller, other_caller: Caller) -> None:
    answers = await asyncio.gather(*(asking.whole() for asking in (caller, other_caller) for _ in range(5)))
    assert [status for status, _ in answers] == [200] * 10
    assert {body["choices"][0]["message"]["content"] for _, body in answers} == {EIGHT}


async def test_an_alias_leads_to_its_model(other_caller: Caller) -> None:
    other_caller.model = "chat"
    status, body = await other_caller.whole(max_tokens=1)
    assert (status, body["model"]) == (200, "chat")
    async with other_caller.session.get(f"{other_caller.url}/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
    assert (cards["chat"]["root"], cards["chat"]["status"]["value"]) == ("quick", "loaded")
    assert (cards["later"]["root"], cards["later"]["status"]["value"]) == ("absent", "unloaded")
    assert "meta" not in cards["later"]
