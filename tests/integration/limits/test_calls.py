"""Callers see their limits: headers, refusals, and what counts."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import redis

from accounts.protocol.records import Limits
from tests.integration.limits.site import KEY, MODEL, SLOW, Answered, ask, name_of, site
from tests.support.stack import Stack
from workers.protocol import keys

TIGHT, TOKENS, PARALLEL, PROMPTS, MONTH, FREE = (f"pk-{name}-0123456789abcdef" for name in "abcdef")
MANY, LEAVER = "pk-many-0123456789abcdef", "pk-leaver-0123456789abcdef"
PATIENT = "patient"
"""A model whose prompts take a minute."""
LIMITS = {
    TIGHT: Limits(requests_per_minute=2, tokens_per_minute=10_000),
    TOKENS: Limits(tokens_per_minute=1000, tokens_per_day=100_000),
    PARALLEL: Limits(max_parallel=2),
    PROMPTS: Limits(max_prompt_tokens=100, max_tokens=3),
    MONTH: Limits(tokens_per_month=50),
    MANY: Limits(requests_per_minute=100, tokens_per_minute=100_000),
    LEAVER: Limits(tokens_per_minute=10_000),
    FREE: Limits(),
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with site(LIMITS, gateways=2) as running:
        time.sleep(1.2)  # the first gateway of all waits a second for others to report
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def counters(stack: Stack, key: str) -> dict[str, list[str]]:
    """Return the counters of a key in Redis: field -> its numbers."""
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        found: Any = client.hgetall(keys.limits_subject(f"key:{name_of(key)}"))
        return {field.decode(): value.decode().split() for field, value in found.items()}


def window(stack: Stack, key: str) -> tuple[int, int]:
    """Requests and tokens of the last minute."""
    numbers = counters(stack, key)["w"]
    return int(numbers[1]), int(numbers[2])


async def until_settled(stack: Stack, key: str, tokens: int) -> None:
    """Returns when the window has so many tokens; the last number is told otherwise."""
    for _ in range(100):
        if window(stack, key)[1] == tokens:
            return
        await asyncio.sleep(0.02)
    assert window(stack, key)[1] == tokens


async def test_replies_tell_what_is_left_and_a_refusal_when_there_is_more(
    stack: Stack, session: aiohttp.ClientSession
) -> None:
    first, second = stack.gateways
    answers = [await ask(session, first, TIGHT), await ask(session, second, TIGHT), await ask(session, first, TIGHT)]
    assert [one.status for one in answers] == [200, 200, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == ["1", "0", "0"]
    assert {one.headers["x-ratelimit-limit-requests"] for one in answers} == {"2"}
    assert {one.headers["x-ratelimit-limit-tokens"] for one in answers} == {"10000"}
    assert answers[0].headers["x-ratelimit-reset-requests"] == "1m0.25s"
    refused = answers[2]
    assert refused.error["code"] == "rate_limit_exceeded"
    assert f"key {name_of(TIGHT)!r} has used 2 of 2 requests per minute" in refused.error["message"]
    assert 55 <= int(refused.headers["retry-after"]) <= 61


async def test_a_caller_without_limits_is_told_nothing(stack: Stack, session: aiohttp.ClientSession) -> None:
    answered = await ask(session, stack.gateways[0], FREE)
    assert answered.status == 200
    assert not [name for name in answered.headers if "ratelimit" in name.lower()]


async def test_openais_package_knows_the_refusal(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.gateways[0].url}/v1", api_key=TIGHT, max_retries=0)

    def ask_on() -> None:
        for _ in range(3):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(openai.RateLimitError) as refused:
        ask_on()
    assert refused.value.code == "rate_limit_exceeded"


async def test_anthropics_package_is_told_in_its_own_headers(stack: Stack) -> None:
    client = anthropic.Anthropic(base_url=stack.gateways[0].url, api_key=MANY, max_retries=0)
    message = client.messages.with_raw_response.create(
        model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "hi"}]
    )
    assert message.headers["anthropic-ratelimit-requests-limit"] == "100"
    assert int(message.headers["anthropic-ratelimit-tokens-remaining"]) < 100_000
    assert message.headers["anthropic-ratelimit-requests-reset"].endswith("Z")


async def test_tokens_are_settled_by_exact_usage(stack: Stack, session: aiohttp.ClientSession) -> None:
    gateway, key = stack.gateways[0], TOKENS
    whole = await ask(session, gateway, key, max_tokens=3)
    total = whole.body["usage"]["total_tokens"]
    await until_settled(stack, key, total)
    several = await ask(session, gateway, key, max_tokens=3, n=3)
    assert several.body["usage"]["completion_tokens"] == 9
    total += several.body["usage"]["total_tokens"]
    await until_settled(stack, key, total)
    assert window(stack, key)[0] == 2, "answers to one request are one request"
    assert [int(counters(stack, key)["d"][1])] == [total]
    too_many = await ask(session, gateway, key, max_tokens=999)
    assert too_many.status == 429
    assert "estimated to take" in too_many.error["message"]
    too_large = await ask(session, gateway, key, max_tokens=2000)
    assert "Request too large" in too_large.error["message"]
    assert too_large.headers["x-should-retry"] == "false"
    assert window(stack, key) == (2, total), "a refused call counts for nothing"


async def test_what_is_left_in_prefill_counts_for_its_prompt(stack: Stack) -> None:
    """Else one who sends long prompts and leaves takes the workers' time for nothing."""
    stack.fake_worker(PATIENT, "--prefill-ms", "60000", wait=True)
    stack.wait_until_listed(stack.gateways[0], PATIENT)
    body = {"model": PATIENT, "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 50}
    async with aiohttp.ClientSession() as session:
        url, headers = f"{stack.gateways[0].url}/v1/chat/completions", {"Authorization": f"Bearer {LEAVER}"}
        with pytest.raises(TimeoutError):
            await session.post(url, json=body, headers=headers, timeout=aiohttp.ClientTimeout(total=1.5))
    counted = 0
    for _ in range(100):
        counted = window(stack, LEAVER)[1]
        if counted < 550:
            break
        await asyncio.sleep(0.02)
    assert 400 <= counted <= 550, "the answer is not counted"
    assert window(stack, LEAVER)[0] == 1


async def test_what_was_cut_off_counts_as_far_as_it_came(stack: Stack) -> None:
    key, before = MANY, (0, 0)
    if counters(stack, key):
        before = window(stack, key)
    async with aiohttp.ClientSession() as session:
        body = {"model": SLOW, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4000}
        url = f"{stack.gateways[0].url}/v1/chat/completions"
        async with session.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            await answer.content.readline()
            assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 100_000 - 4000
    for _ in range(100):
        requests, tokens = window(stack, key)
        if requests == before[0] + 1 and tokens - before[1] < 4000:
            break
        await asyncio.sleep(0.02)
    assert 11 <= tokens - before[1] < 4000


async def test_calls_under_way_are_limited_over_all_gateways(stack: Stack, session: aiohttp.ClientSession) -> None:
    first, second = stack.gateways
    headers = {"Authorization": f"Bearer {PARALLEL}"}
    body = {"model": SLOW, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4000}
    async with (
        session.post(f"{first.url}/v1/chat/completions", json=body, headers=headers) as one,
        session.post(f"{second.url}/v1/chat/completions", json=body, headers=headers) as other,
    ):
        await one.content.readline()
        await other.content.readline()
        refused = await ask(session, first, PARALLEL)
        assert refused.status == 429
        assert "2 of 2 calls under way (max_parallel)" in refused.error["message"]
    for _ in range(100):
        answered = await ask(session, first, PARALLEL)
        if answered.status == 200:
            break
        await asyncio.sleep(0.02)
    assert answered.status == 200
    assert counters(stack, PARALLEL)["c"][1] == "0"


async def test_prompts_and_answers_are_bounded(stack: Stack, session: aiohttp.ClientSession) -> None:
    long = await ask(session, stack.gateways[0], PROMPTS, messages=[{"role": "user", "content": "word " * 200}])
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 100 tokens" in long.error["message"]
    assert f"limit of key {name_of(PROMPTS)!r} (max_prompt_tokens)" in long.error["message"]
    short = await ask(session, stack.gateways[0], PROMPTS)
    assert short.body["usage"]["completion_tokens"] == 3


async def test_a_month_that_is_used_up_names_its_end(stack: Stack, session: aiohttp.ClientSession) -> None:
    answers = [await ask(session, stack.gateways[0], MONTH, max_tokens=4) for _ in range(6)]
    refused = answers[-1]
    assert refused.status == 429
    assert "tokens per month (tokens_per_month)" in refused.error["message"]
    assert "-01 00:00 (UTC)" in refused.error["message"].partition("renewed on")[2]
    assert refused.headers["x-should-retry"] == "false"


async def test_a_response_in_the_background_is_refused_at_once(stack: Stack, session: aiohttp.ClientSession) -> None:
    for _ in range(3):
        answered = await ask(session, stack.gateways[0], TIGHT, "/v1/responses", input="hi", background=True)
    assert (answered.status, answered.error["code"]) == (429, "rate_limit_exceeded")


async def test_a_resumable_stream_is_refused_and_counted_once(stack: Stack, session: aiohttp.ClientSession) -> None:
    before = window(stack, MANY)[0]
    url, headers = f"{stack.gateways[0].url}/v1/chat/completions", {"x-resume-grace": "5"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with session.post(url, json=body, headers=headers | {"Authorization": f"Bearer {MANY}"}) as answer:
        assert answer.status == 200
        await answer.read()
    assert window(stack, MANY)[0] == before + 1
    async with session.post(url, json=body, headers=headers | {"Authorization": f"Bearer {TIGHT}"}) as answer:
        assert answer.status == 429


async def test_questions_about_a_model_are_not_limited(stack: Stack, session: aiohttp.ClientSession) -> None:
    for path in ("/tokenize", "/apply-template", "/v1/chat/completions/input_tokens"):
        body: dict[str, Any] = {"content": "hi"} if path == "/tokenize" else {"messages": []}
        body = {"messages": [{"role": "user", "content": "hi"}]} if "messages" in body else body
        asked: Answered = await ask(session, stack.gateways[0], TIGHT, path, **body)
        assert asked.status == 200, asked.body


async def test_refusals_are_counted(stack: Stack, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{stack.gateways[0].url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counted = [line for line in lines if line.startswith("paddock_limited_total{")]
    assert [line for line in counted if 'kind="key"' in line and 'limit="requests_per_minute"' in line]
    assert [line for line in counted if 'limit="max_prompt_tokens"' in line]


async def test_a_killed_gateway_leaves_no_calls_under_way(session: aiohttp.ClientSession) -> None:
    with site(Limits(max_parallel=2), gateways=2) as stack:
        first, second = stack.gateways
        body = {"model": SLOW, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4000}
        streams = [
            await session.post(
                f"{first.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
            )
            for _ in range(2)
        ]
        for stream in streams:
            await stream.content.readline()
        assert (await ask(session, second)).status == 429
        first.signal(signal.SIGKILL)
        killed_at = time.monotonic()
        while (await ask(session, second)).status == 429:
            assert time.monotonic() - killed_at < keys.LIMITS_TTL_S + 3
            await asyncio.sleep(0.2)
        both = await asyncio.gather(*(ask(session, second) for _ in range(2)))
        assert [one.status for one in both] == [200, 200]
        for stream in streams:
            stream.close()
