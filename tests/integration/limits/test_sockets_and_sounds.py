"""Limits of answers over WebSocket, each message a call of its own, and of transcriptions, which are sent as forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from typing import Any

import aiohttp
import pytest
import redis

from accounts.protocol.records import Limits
from tests.integration.limits.site import MODEL, SLOW, ask, key_setting, name_of
from tests.support.sent_forms import CONTENT_TYPE, form
from tests.support.socket_caller import connected
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(2000)
LIMITS = {
    f"pk-{name}-of-{way}": limits
    for way, tokens in (("sockets", 100), ("sounds", 400))
    for name, limits in {
        "requests": Limits(requests_per_minute=2),
        "tokens": Limits(tokens_per_minute=tokens),
        "day": Limits(tokens_per_day=tokens),
        "calls": Limits(max_parallel=1),
    }.items()
}
CALL_TOKENS = 15
"""What a short message and its answer take."""
SETTLED_S = 0.1
"""Within which what a call was estimated to take makes way for what it took."""
CODE = "rate_limit_exceeded"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "1", "--tokens", "4", "--inputs", "text,audio", slots=64)
        running.fake_worker(SLOW, "--step-ms", "20", "--tokens", "100000", "--inputs", "text,audio", slots=64)
        gateway = running.gateway(api_keys=key_setting(LIMITS))
        running.wait_until_listed(gateway, MODEL, SLOW)
        yield running


@pytest.fixture
def gateway(stack: Stack) -> Process:
    return stack.gateways[0]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def window(stack: Stack, key: str) -> tuple[int, int]:
    """Requests and tokens of a key in the last minute."""
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        value: Any = client.hget(keys.limits_subject(f"key:{name_of(key)}"), "w")
        return (int(value.split()[1]), int(value.split()[2])) if value else (0, 0)


def under_way(stack: Stack, key: str) -> int:
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        value: Any = client.hget(keys.limits_subject(f"key:{name_of(key)}"), "c")
        return int(value.split()[1]) if value else 0


async def transcribe(
    session: aiohttp.ClientSession, gateway: Process, key: str, model: str = MODEL, **fields: str
) -> tuple[int, Any]:
    """Status and answer of a sound that is sent."""
    headers = {"Content-Type": CONTENT_TYPE.decode(), "Authorization": f"Bearer {key}"}
    data = BytesIO(form(("file", WAV), ("model", model), *fields.items()))
    async with session.post(f"{gateway.url}/v1/audio/transcriptions", data=data, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_each_message_of_a_socket_is_a_request(stack: Stack, gateway: Process) -> None:
    key = "pk-requests-of-sockets"
    async with connected(gateway.url, key, MODEL) as socket:
        for _ in range(2):
            assert (await socket.answer(input="hi"))["status"] == "completed"
        status, error = await socket.refusal(input="hi")
        assert (status, error["code"]) == (429, CODE)
    async with connected(gateway.url, key, MODEL) as socket:
        assert (await socket.refusal(input="hi"))[0] == 429, "another connection has no minute of its own"
    assert window(stack, key)[0] == 2


@pytest.mark.parametrize("name", ["tokens", "day"])
async def test_messages_of_a_socket_count_tokens(stack: Stack, gateway: Process, name: str) -> None:
    statuses, used = list[int](), 0
    async with connected(gateway.url, f"pk-{name}-of-sockets", MODEL) as socket:
        for _ in range(20):
            await socket.ask(input="hi", max_output_tokens=4)
            (*_, last) = await socket.rest()
            statuses.append(last.get("status", 200))
            used += last["response"]["usage"]["total_tokens"] if "response" in last else 0
            await asyncio.sleep(SETTLED_S)
    assert statuses == sorted(statuses)
    assert (statuses[0], statuses[-1]) == (200, 429)
    assert 50 < used < 100 + CALL_TOKENS, "the last one was estimated to take less"


async def test_answers_of_a_socket_are_calls_under_way(
    stack: Stack, gateway: Process, session: aiohttp.ClientSession
) -> None:
    key = "pk-calls-of-sockets"
    async with connected(gateway.url, key, SLOW) as socket:
        await socket.ask(input="hi", max_output_tokens=4000)
        await socket.until("response.output_text.delta")
        async with connected(gateway.url, key, MODEL) as other:
            status, error = await other.refusal(input="hi")
            assert (status, error["code"]) == (429, CODE)
            assert "1 of 1 calls under way (max_parallel)" in error["message"]
        assert (await ask(session, gateway, key)).status == 429
    await until(lambda: under_way(stack, key) == 0, 5, "a socket that is closed takes its calls along")
    assert (await ask(session, gateway, key)).status == 200


async def test_a_transcription_is_a_request(stack: Stack, gateway: Process, session: aiohttp.ClientSession) -> None:
    key = "pk-requests-of-sounds"
    answers = [await transcribe(session, gateway, key) for _ in range(3)]
    assert [status for status, _ in answers] == [200, 200, 429]
    assert answers[-1][1]["error"]["code"] == CODE
    assert window(stack, key)[0] == 2


@pytest.mark.parametrize("name", ["tokens", "day"])
async def test_transcriptions_count_tokens(gateway: Process, session: aiohttp.ClientSession, name: str) -> None:
    """A sound is estimated to have 128 tokens; the fake worker tells of 17 prompt tokens, and four of the answer."""
    statuses, used = list[int](), 0
    for _ in range(20):
        status, answer = await transcribe(session, gateway, f"pk-{name}-of-sounds", max_tokens="4")
        statuses.append(status)
        used += answer["usage"]["total_tokens"] if status == 200 else 0
        await asyncio.sleep(SETTLED_S)
    assert statuses == sorted(statuses)
    assert (statuses[0], statuses[-1]) == (200, 429)
    assert 200 < used <= 400


async def test_transcriptions_are_calls_under_way(
    stack: Stack, gateway: Process, session: aiohttp.ClientSession
) -> None:
    key = "pk-calls-of-sounds"
    long = asyncio.create_task(transcribe(session, gateway, key, SLOW, max_tokens="4000"))
    await until(lambda: under_way(stack, key) == 1, 5, "it is under way")
    status, answer = await transcribe(session, gateway, key)
    assert (status, answer["error"]["code"]) == (429, CODE)
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await until(lambda: under_way(stack, key) == 0, 5, "who leaves takes the call along")
    assert (await transcribe(session, gateway, key))[0] == 200
