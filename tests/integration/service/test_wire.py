"""One healthy worker, seen from a gateway."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import pytest

from tests.integration.service.conftest import Process
from tests.integration.service.wire import SECRET, Gateway, words
from workers.protocol.events import Failure, FailureCode, Finished, FinishReason, Started
from workers.protocol.framing import CANCEL_PATH, EVENTS_PATH, SUBMIT_PATH
from workers.protocol.requests import Accepted


@pytest.fixture
def gateway(session: aiohttp.ClientSession, worker: Process, request: pytest.FixtureRequest) -> Gateway:
    return Gateway(session, worker.address, name=request.node.name[:100])


async def busy(gateway: Gateway) -> int:
    _, body = await gateway.get("/health")
    return int(json.loads(body)["slots_busy"])


async def test_an_answer_from_submit_to_its_end(gateway: Gateway) -> None:
    async with gateway.connected() as heard:
        accepted = await gateway.submit(1)
        await heard.until_end(1)
    assert isinstance(accepted, Accepted)
    first, *_, last = heard.of(1)
    assert isinstance(first, Started)
    assert first.num_prompt_tokens == accepted.num_prompt_tokens > 0
    assert heard.text(1) == words(20)
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens) == (FinishReason.STOP, 20)
    assert heard.last_id.startswith(accepted.boot + "-")
    assert heard.alive == []


async def test_more_calls_than_slots_are_all_answered(gateway: Gateway) -> None:
    async with gateway.connected() as heard:
        await asyncio.gather(*(gateway.submit(call, max_tokens=5) for call in range(8)))
        await heard.until_end(*range(8))
    assert {heard.text(call) for call in range(8)} == {words(5)}
    slots = [event.slot for event in heard.events if isinstance(event, Started)]
    assert sorted(set(slots)) == [0, 1, 2, 3]


async def test_a_full_worker_says_busy(gateway: Gateway) -> None:
    async with gateway.connected():
        outcomes = await asyncio.gather(*(gateway.submit(call) for call in range(20)))
        await gateway.cancel(*range(20))
    refused = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert refused
    assert {failure.code for failure in refused} == {FailureCode.BUSY}


async def test_a_dropped_connection_loses_no_token(gateway: Gateway) -> None:
    await gateway.submit(1, max_tokens=40, ignore_eos=True)
    for num_events in (5, 12, 25):
        async with gateway.connected() as heard:
            await heard.until(lambda n=num_events: len(heard.events) >= n)  # type: ignore[misc]
        await asyncio.sleep(0.02)
    async with gateway.connected() as heard:
        await heard.until_end(1)
    assert heard.text(1) == words(40)
    assert heard.alive == []


async def test_a_foreign_id_brings_the_calls_alive_first(gateway: Gateway) -> None:
    gateway.heard.last_id = "another-boot-17"
    await gateway.submit(1)
    async with gateway.connected() as heard:
        await heard.until_end(1)
    assert heard.alive == [[1]]
    assert heard.text(1) == words(20)


async def test_a_newer_connection_ends_the_older(gateway: Gateway) -> None:
    async with gateway.connected() as heard:
        older_is_over = asyncio.create_task(heard.over.wait())
        newer = Gateway(gateway._session, gateway._address, gateway._name)
        async with newer.connected() as heard_newer:
            await asyncio.wait_for(older_is_over, 2)
            await newer.submit(1)
            await heard_newer.until_end(1)
    assert heard.events == []


async def test_a_cancelled_call_frees_its_slot_and_says_nothing_more(gateway: Gateway) -> None:
    async with gateway.connected() as heard:
        await gateway.submit(1, max_tokens=10_000, ignore_eos=True)
        await heard.until(lambda: len(heard.events) > 3)
        await gateway.cancel(1, 99)
        await asyncio.sleep(0.02)
        num_events = len(heard.events)
        assert await busy(gateway) == 0
        await asyncio.sleep(0.05)
    assert len(heard.events) == num_events
    assert heard.end(1) is None


async def test_a_gateway_that_is_gone_has_its_calls_cancelled(gateway: Gateway) -> None:
    async with gateway.connected() as heard:
        await gateway.submit(1, max_tokens=100_000, ignore_eos=True)
        await heard.until(lambda: heard.events)
    await asyncio.sleep(0.1)
    assert await busy(gateway) == 1
    await asyncio.sleep(0.4)
    assert await busy(gateway) == 0
    async with gateway.connected() as heard:
        await heard.until(lambda: heard.alive)
    assert heard.alive == [[]]


async def test_a_prompt_longer_than_the_context_names_both_counts(gateway: Gateway) -> None:
    failure = await gateway.submit(1, "x" * 4 * 200)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.CONTEXT_OVERFLOW
    assert "100" in failure.message
    assert "21" in failure.message  # 2xx tokens


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"gateway": "g"}',
        b'{"gateway":"g","call":"1","tenant":"t","request":{"messages":[]}}',
        b'{"gateway":"g","call":1,"tenant":"t","request":{"messages":[{"role":"robot"}]}}',
        b'{"gateway":"g","call":1,"tenant":"t","request":{"messages":[]}}',
    ],
)
async def test_a_body_that_is_no_submit(gateway: Gateway, body: bytes) -> None:
    status, answer = await gateway.post(SUBMIT_PATH, body)
    assert status == 400
    assert msgspec.json.decode(answer, type=Failure).code is FailureCode.INVALID_REQUEST


async def test_a_body_that_is_no_cancel(gateway: Gateway) -> None:
    status, answer = await gateway.post(CANCEL_PATH, b'{"gateway":"g","calls":["x"]}')
    assert (status, msgspec.json.decode(answer, type=Failure).code) == (400, FailureCode.INVALID_REQUEST)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {SECRET}"}])
@pytest.mark.parametrize("path", [SUBMIT_PATH, CANCEL_PATH, EVENTS_PATH + "?gateway=g", "/v1/unknown"])
async def test_a_token_of_this_process_is_asked_for_and_the_secret_itself_is_none(
    session: aiohttp.ClientSession, worker: Process, path: str, headers: dict[str, str]
) -> None:
    method = "GET" if path.startswith(EVENTS_PATH) else "POST"
    async with session.request(method, worker.address + path, headers=headers, data=b"{}") as response:
        assert response.status == 401
        failure = msgspec.json.decode(await response.read(), type=Failure)
    assert failure.code is FailureCode.UNAUTHORIZED
    assert "PADDOCK_WORKER_SECRET" in failure.message


async def test_the_event_stream_needs_to_know_whose_it_is(gateway: Gateway) -> None:
    status, body = await gateway.get(EVENTS_PATH, **await gateway.headers())
    assert (status, msgspec.json.decode(body, type=Failure).param) == (400, "gateway")


async def test_health_and_metrics_need_no_secret(gateway: Gateway) -> None:
    status, body = await gateway.get("/health")
    health = json.loads(body)
    assert (status, health["status"], health["model"], health["slots"]) == (200, "ok", "steady", 4)
    assert {"version", "boot", "worker", "slots_busy"} <= set(health)
    status, body = await gateway.get("/metrics")
    assert status == 200
    assert 'vllm:num_requests_running{model_name="steady"}' in body.decode()


async def test_a_silent_stream_is_kept_alive_by_comments(gateway: Gateway) -> None:
    async with gateway.connected() as heard:
        first = heard.num_bytes
        await heard.until(lambda: heard.num_bytes > first, timeout_s=2.5)
    assert heard.events == []
