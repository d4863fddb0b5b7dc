"""Models that have no worker: calls are held, counted, and answered by the first one that comes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from tests.support.caller import Caller, Stream, calling
from tests.support.scrape import Scrape
from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

MODELS = ("cold", "toy", "crowd", "vectors", "brief", "first", "second", "lost", "bounded", "never")
CATALOG = "\n".join(
    [
        "models:",
        *(f"  - {{name: {name}, path: {name}.gguf, workers: 0}}" for name in MODELS),
        "aliases:",
        "  chain: {targets: [first], fallbacks: [second]}",
    ]
)
PING_S = 0.1
QUEUE_S, START_S = 20.0, 30.0
IN_TIME_S = 1.0
"""What was promised: for a held call to show, for one that left to count no more, for the first token."""
QUICK = ("--step-ms", "2", "--tokens", "4")


@pytest.fixture(scope="module")
def cold() -> Iterator[Stack]:
    """Two gateways, a catalog, and no worker at all."""
    with Stack() as running:
        catalog = running.folder / "catalog.yaml"
        catalog.write_text(CATALOG)
        for _ in range(2):
            running.gateway(
                wait=False,
                catalog=catalog,
                max_queue=200,
                ping_interval_s=PING_S,
                queue_timeout_s=QUEUE_S,
                start_timeout_s=START_S,
            )
        for gateway in running.gateways:
            running.wait_until_ready(gateway)
        yield running


@asynccontextmanager
async def asking(stack: Stack, model: str, gateway: int = 0) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[gateway].url, stack.key, model) as caller:
        yield caller


@contextmanager
def one_more(stack: Stack, **settings: Any) -> Iterator[Process]:
    """A gateway beside the shared ones."""
    process = stack.gateway(catalog=stack.folder / "catalog.yaml", ping_interval_s=PING_S, **settings)
    stack.gateways.remove(process)
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def first_worker(stack: Stack, model: str, *flags: str, slots: int = 8, **more: Any) -> Iterator[Process]:
    """A fake worker of a model, for the time of the block."""
    process = stack.fake_worker(model, *flags, worker_id=f"{model}-w", slots=slots, **more)
    try:
        yield process
    finally:
        process.kill()


async def number_of(stack: Stack, name: str, model: str) -> float:
    """The sum over all gateways, as a scaler reads it."""
    total = 0.0
    for gateway in range(len(stack.gateways)):
        async with asking(stack, model, gateway) as caller, caller.session.get(f"{caller.url}/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                found = (one for one in family.samples if one.name == name and one.labels.get("model") == model)
                total += sum(sample.value for sample in found)
    return total


async def shows(stack: Stack, model: str, count: int) -> None:
    """Every gateway counts so many calls that wait, within the time that was promised."""
    began = time.monotonic()
    while (found := await number_of(stack, "paddock_queue_length", model)) != count:
        assert time.monotonic() - began < IN_TIME_S, f"{found} calls wait for {model}, not {count}"
        await asyncio.sleep(0.02)


async def first_line(stream: Stream) -> bytes:
    return await stream.response.content.readline()


async def test_gateways_are_ready_and_tell_who_has_no_worker(cold: Stack) -> None:
    async with asking(cold, "cold") as caller, caller.session.get(f"{caller.url}/ready") as response:
        assert response.status == 200
        body = await response.json()
    assert body["status"] == "ready"
    assert set(body["without_workers"]) >= {"cold", "never"}


async def test_a_model_that_nobody_knows_is_not_waited_for(cold: Stack) -> None:
    async with asking(cold, "unheard-of") as caller:
        status, body = await caller.whole()
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_held_call_shows_and_one_that_leaves_shows_no_more(cold: Stack) -> None:
    async with asking(cold, "cold") as caller, asking(cold, "cold", 1) as other:
        await shows(cold, "cold", 0)
        async with caller.stream() as stream:
            assert await first_line(stream) == b": waiting position=1 for=worker\n"
            whole = asyncio.create_task(other.whole())
            await shows(cold, "cold", 2)
            whole.cancel()
            await asyncio.wait([whole])
            await shows(cold, "cold", 1)
        await shows(cold, "cold", 0)
    with redis.Redis(unix_socket_path=str(cold.redis.socket)) as client:
        await until(lambda: client.zcard(keys.queue("cold")) == 0, IN_TIME_S, "nobody is in line")


async def test_the_first_worker_answers_at_once(cold: Stack) -> None:
    """A true worker: its model is loaded before it registers."""
    async with asking(cold, "toy") as caller, asking(cold, "toy", 1) as other, caller.stream(max_tokens=4) as stream:
        whole = asyncio.create_task(other.whole(max_tokens=4))
        await first_line(stream)
        process = cold.worker(DEMO_MODEL, "toy", worker_id="toy-w", slots=2, ctx=512, wait=False)
        reading = asyncio.create_task(stream.until_text())
        with redis.Redis(unix_socket_path=str(cold.redis.socket)) as client:
            await until(lambda: bool(client.exists(keys.worker("toy", "toy-w"))), 60, "it is registered")
        registered_at = time.monotonic()
        await asyncio.wait_for(reading, IN_TIME_S)
        took_s = time.monotonic() - registered_at
        assert (await whole)[0] == 200
        await stream.finish()
    assert stream.error is None
    print(f"\nfirst token {took_s:.3f} s after the registration")
    process.stop()


async def test_a_hundred_held_calls_are_served_in_the_order_in_which_they_came(cold: Stack) -> None:
    served: list[int] = []

    async def ask(number: int, caller: Caller) -> None:
        async with caller.stream(max_tokens=1) as stream:
            await stream.until_text()
            served.append(number)
            await stream.finish()
        assert stream.error is None

    async with AsyncExitStack() as opened:
        callers = [await opened.enter_async_context(asking(cold, "crowd", gateway)) for gateway in range(2)]
        tasks = []
        for number in range(100):
            tasks.append(asyncio.create_task(ask(number, callers[number % 2])))
            await asyncio.sleep(0.003)
        await shows(cold, "crowd", 100)
        with first_worker(cold, "crowd", *QUICK, slots=1):
            began = time.monotonic()
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
            print(f"\n100 calls, one slot: {time.monotonic() - began:.2f} s")
    late = max(abs(number - place) for place, number in enumerate(served))
    # So many of those next in line are asked who loses most by waiting: 16. The rest is what a busy machine mixes up,
    # where calls come, and where answers are read. Without any order it is more than 80.
    assert late <= 40, served


async def test_nobody_is_held_for_ever(cold: Stack) -> None:
    with one_more(cold, start_timeout_s=0.6) as gateway:
        async with calling(gateway.url, cold.key, "never") as caller:
            began = time.monotonic()
            async with caller.session.post(f"{caller.url}/v1/chat/completions", json=caller.body()) as response:
                body = await response.json()
        assert time.monotonic() - began > 0.5
    assert (response.status, body["error"]["code"]) == (503, "queue_timeout")
    assert re.search(r"no worker of model 'never' came in \d\.\d s \(start_timeout_s\)", body["error"]["message"])
    assert int(response.headers["retry-after"]) >= 1


async def test_what_a_worker_does_is_known_when_it_has_come(cold: Stack) -> None:
    async with asking(cold, "vectors") as caller:
        chat = asyncio.create_task(caller.whole())
        vectors = asyncio.create_task(posted(caller, "/v1/embeddings", {"model": "vectors", "input": "Hi"}))
        await shows(cold, "vectors", 2)
        with first_worker(cold, "vectors", "--kind", "embed", "--ctx", "64"):
            status, answer = await chat
            assert (status, answer["error"]["code"]) == (501, "not_supported")
            assert "makes embeddings" in answer["error"]["message"]
            status, answer = await vectors
            assert (status, len(answer["data"])) == (200, 1)


async def posted(caller: Caller, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with caller.session.post(f"{caller.url}{path}", json=body) as response:
        return response.status, json.loads(await response.read())


async def test_every_dialect_is_held(cold: Stack) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16, "store": False},
        "/completion": {"prompt": "Hi", "n_predict": 1},
        "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    }
    async with asking(cold, "brief") as caller:
        held = [asyncio.create_task(posted(caller, path, {"model": "brief", **body})) for path, body in asked.items()]
        await shows(cold, "brief", len(asked))
        with first_worker(cold, "brief", *QUICK):
            answers = await asyncio.gather(*held)
    assert [status for status, _ in answers] == [200] * len(asked), answers


async def test_questions_to_a_worker_are_told_that_there_is_none(cold: Stack) -> None:
    async with asking(cold, "never") as caller:
        status, body = await posted(caller, "/tokenize", {"model": "never", "content": "Hi"})
        assert (status, body["error"]["code"]) == (503, 503)
        messages = [{"role": "user", "content": "Hi"}]
        path = "/v1/chat/completions/input_tokens"
        status, body = await posted(caller, path, {"model": "never", "messages": messages})
        assert status == 503
        assert (body["error"]["type"], body["error"]["code"]) == ("unavailable_error", "no_worker")
        assert "No worker serves `never`" in body["error"]["message"]
        status, body = await posted(caller, "/v1/messages/count_tokens", {"model": "never", "messages": messages})
        assert (status, body["error"]["type"]) == (529, "overloaded_error")
        async with caller.session.get(f"{caller.url}/slots", params={"model": "never"}) as response:
            assert response.status == 503
        async with caller.session.get(f"{caller.url}/metrics") as response:
            shown = Scrape(await response.text())
    assert shown.value("paddock_failures_total", model="never", who="policy", code="no_worker") == 4
    assert shown.sum("paddock_failures_total", model="never", who="worker") == 0, "nobody is woken for it"
    assert shown.sum("paddock_requests_total", model="never") == 4
    assert shown.sum("paddock_e2e_seconds_count", model="never") == 0
    assert shown.sum("gen_ai_server_request_duration_seconds_count", gen_ai_response_model="never") == 0


async def test_whoever_of_a_chain_has_the_first_worker_answers(cold: Stack) -> None:
    async with asking(cold, "chain") as caller:
        held = asyncio.create_task(caller.whole(max_tokens=1))
        await shows(cold, "first", 1)
        with first_worker(cold, "second", *QUICK):
            status, _ = await asyncio.wait_for(held, 3)
        assert status == 200


async def test_the_bound_of_the_line_holds(cold: Stack) -> None:
    with one_more(cold, max_queue=2) as gateway:
        async with calling(gateway.url, cold.key, "bounded") as caller, caller.stream() as one, caller.stream() as two:
            assert await first_line(one)
            assert await first_line(two)
            status, body = await caller.whole()
            assert (status, body["error"]["code"]) == (429, "queue_full")


async def test_a_redis_that_comes_back_empty_forgets_nobody_who_is_held(cold: Stack) -> None:
    async with asking(cold, "lost") as caller, asking(cold, "lost", 1) as other:
        held = [asyncio.create_task(one.whole(max_tokens=1)) for one in (caller, other)]
        await shows(cold, "lost", 2)
        cold.redis.kill()
        await asyncio.sleep(0.3)
        late = asyncio.create_task(caller.whole(max_tokens=1))
        await asyncio.sleep(0.3)
        assert not late.done(), "it is held as well"
        cold.redis.start()
        with first_worker(cold, "lost", *QUICK):
            answers = await asyncio.wait_for(asyncio.gather(*held, late), 10)
        assert [status for status, _ in answers] == [200, 200, 200]
