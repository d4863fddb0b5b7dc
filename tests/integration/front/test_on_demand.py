"""Models that a supervisor loads on demand, as callers see them; the supervisor is a fake one, so are its workers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import redis

from accounts.protocol.records import digest
from gateway.api.http.listeners import MOST_PER_KEY, MOST_PER_TEAM
from gateway.api.operations.health import FRESH_S
from gateway.registry.model_states import AWAITED_S, SETTLE_S
from tests.support.caller import Caller, calling
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.redis_server import logged_in
from tests.support.stack import Stack
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.keys import HEARTBEAT_TTL_S
from workers.protocol.residency import LIFE_S, TOLD_EVERY_S, Detail, ModelState, Why

MODELS = ("small", "large", "coder", "writer", "fast", "other", "late", "sleepy")
CATALOG = "\n".join(
    [
        "models:",
        *(f"  - {{name: {name}, path: {name}.gguf, residency: {{}}}}" for name in MODELS),
        "aliases:",
        "  chain: {targets: [large], fallbacks: [writer]}",
    ]
)
LIMITED_KEY = "pk-limited-0123456789"
PING_S = 0.1
AT_ONCE_S = 0.3
"""Within it a call is refused that no machine need hear of."""
KNOWN_S = 2.5
"""Within it a gateway has read what a supervisor tells."""
QUICK = ("--step-ms", "2", "--tokens", "4")
UNLOADED = ModelState(status="unloaded")
NARROW_KEY = "pk-narrow-0123456789abcdef"
TOO_LARGE = ModelState(status="unloaded", why=Why.of("no machine has the memory"), is_hopeless=True, is_closed=True)
BY_ADMIN = ModelState(status="unloaded", why=Why.of("an admin has unloaded it"), is_hopeless=True)
CLOSED = ModelState(
    status="unloaded", why=Why.of(("coder",), " is not loaded by calls"), is_hopeless=True, is_closed=True
)


def loading(progress: float | None) -> ModelState:
    return ModelState(status="loading", progress=progress, why=Why.of("1 call waits"))


def failed() -> ModelState:
    return ModelState(status="failed", why=Why.of("the file ends early"), retry_at=time.time() + 20)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A gateway whose models all load on demand, with a key that is limited to one of them."""
    narrow = {"name": "narrow", "team": "blue", "sha256": digest(NARROW_KEY), "aliases": ["coder", "chain"]}
    with Stack() as running:
        catalog = running.folder / "catalog.yaml"
        catalog.write_text(CATALOG)
        limits = {"requests_per_minute": 1}
        limited = {"name": "limited", "team": "red", "sha256": digest(LIMITED_KEY), "limits": limits}
        running.gateway(
            catalog=catalog, ping_interval_s=PING_S, start_timeout_s=30, api_keys=json.dumps([limited, narrow])
        )
        yield running


@pytest.fixture
def supervisor(stack: Stack) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(stack.redis.url, dict.fromkeys(MODELS, UNLOADED)) as running:
        yield running


@asynccontextmanager
async def asking(stack: Stack, model: str) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, model) as caller:
        yield caller


async def got(caller: Caller, path: str) -> dict[str, Any]:
    async with caller.session.get(f"{caller.url}{path}") as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def status_of(caller: Caller, **wanted: object) -> dict[str, Any]:
    """The status of the caller's model, once it has all of this."""
    status: dict[str, Any] = {}
    async with asyncio.timeout(KNOWN_S):
        while not (status and wanted.items() <= status.items()):
            status = (await got(caller, f"/v1/models/{caller.model}"))["status"]
            await asyncio.sleep(0.02)
    return status


async def posted(caller: Caller, path: str) -> tuple[int, dict[str, Any]]:
    async with caller.session.post(f"{caller.url}{path}", json={"model": caller.model}) as response:
        return response.status, await response.json()


async def test_a_gateway_is_ready_without_models_that_calls_load(stack: Stack) -> None:
    async with asking(stack, "small") as caller:
        assert set((await got(caller, "/ready"))["without_workers"]) == set(MODELS)


async def test_a_call_is_told_how_far_its_model_is_and_served(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "small") as caller, caller.stream(max_tokens=1) as stream:
        assert await stream.response.content.readline() == b": waiting position=1 for=worker\n"
        await until(lambda: supervisor.num_waiting("small") == 1, 1.0, "the supervisor hears of it")
        supervisor.tell(small=loading(0.426))
        async with asyncio.timeout(KNOWN_S):
            while await stream.response.content.readline() != b": waiting position=1 for=worker loading=43%\n":
                pass
        process = stack.fake_worker("small", *QUICK, worker_id="small-w")
        await stream.until_text()
        await stream.finish()
        assert stream.error is None
        process.kill()


async def test_a_call_that_its_limits_refuse_loads_nothing(stack: Stack, supervisor: FakeSupervisor) -> None:
    """A caller beyond its limits would have models loaded in turns, and others leave for them."""
    process = stack.fake_worker("fast", *QUICK, worker_id="fast-w")
    async with calling(stack.gateways[0].url, LIMITED_KEY, "fast") as caller:
        assert (await caller.whole(max_tokens=1))[0] == 200
        caller.model = "other"
        refused = asyncio.create_task(caller.whole(max_tokens=1))
        until_at = time.monotonic() + 2 * TOLD_EVERY_S
        while time.monotonic() < until_at:
            assert not supervisor.num_waiting("other")
            await asyncio.sleep(0.01)
        status, body = await asyncio.wait_for(refused, 2)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    process.kill()


@pytest.mark.serial
async def test_callers_who_leave_at_once_load_nothing_and_hold_nothing(
    stack: Stack, supervisor: FakeSupervisor
) -> None:
    body = json.dumps({"model": "coder", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    address = urlsplit(stack.gateways[0].url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    is_over = False

    async def watch() -> int:
        most = 0
        while not is_over:
            most = max(most, supervisor.num_waiting("coder"))
            await asyncio.sleep(0.005)
        return most

    watching = asyncio.create_task(watch())
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port)) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves by a reset
            caller.sendall(head.encode() + body)
        await asyncio.sleep(0.05)
    await asyncio.sleep(TOLD_EVERY_S)
    is_over = True
    assert await watching == 0
    with redis.Redis.from_url(stack.redis.url) as client:
        await until(lambda: not client.zcard(keys.queue("coder")), 1.0, "none of them waits in line")
        assert not client.zcard(keys.tickets("coder"))
        assert not client.keys(keys.worker_leases("coder", "*"))


async def test_a_model_that_fails_to_load_refuses_its_calls(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "coder") as caller:
        held = asyncio.create_task(caller.whole(max_tokens=1))
        await until(lambda: supervisor.num_waiting("coder") == 1, 1.0, "it waits")
        supervisor.tell(coder=loading(None))
        await asyncio.sleep(1.2)
        supervisor.tell(coder=failed())
        status, body = await asyncio.wait_for(held, 2)
        assert (status, body["error"]["code"]) == (503, "model_not_loaded")
        assert body["error"]["message"].startswith(
            "Model 'coder' can't be loaded now: the file ends early. It is tried"
        )
        # Whoever comes next is told as well, as soon as the supervisor has heard of the call.
        async with caller.session.post(f"{caller.url}/v1/chat/completions", json=caller.body()) as response:
            assert response.status == 503
            assert 10 <= int(response.headers["retry-after"]) <= 20
        shown = await status_of(caller, failed=True)
        assert (shown["value"], shown["reason"]) == ("unloaded", "the file ends early")
        told = (await got(caller, "/admin/explain?model=coder"))["residency"]
        assert (told["status"], told["machines"]["host1"]["why"]) == ("failed", "the file ends early")


async def test_a_key_is_told_of_no_models_but_its_own(stack: Stack, supervisor: FakeSupervisor) -> None:
    parts = ("memory for ", ("coder",), " is kept for ", ("fast", "small", "writer"), Detail(": pirate.gguf is there"))
    supervisor.tell(coder=ModelState(status="unloaded", why=Why(parts), is_hopeless=True))
    url, own = stack.gateways[0].url, "memory for coder is kept for writer, 2 other models"
    async with calling(url, NARROW_KEY, "coder") as caller:
        assert (await status_of(caller, value="unloaded", reason=own))["reason"] == own, "the chain has the writer"
        status, body = await asyncio.wait_for(caller.whole(), 10)
        assert (status, body["error"]["code"]) == (503, "model_not_loaded")
        assert f"can't be loaded now: {own}. Waiting" in body["error"]["message"]
        async with caller.session.get(f"{url}/models/sse") as response:
            events = Events(response)
            assert (await events.until("coder", "unloaded"))["data"]["reason"] == own
    async with asking(stack, "coder") as admin:
        whole = "memory for coder is kept for fast, small, writer: pirate.gguf is there"
        assert (await status_of(admin, value="unloaded"))["reason"] == whole
        assert whole in (await asyncio.wait_for(admin.whole(), 10))[1]["error"]["message"]
        assert (await got(admin, "/admin/explain?model=coder"))["residency"]["why"] == whole


async def test_a_fallback_is_loaded_where_its_model_cannot_be(stack: Stack, supervisor: FakeSupervisor) -> None:
    supervisor.tell(large=TOO_LARGE)
    async with asking(stack, "chain") as caller:
        held = asyncio.create_task(caller.whole(max_tokens=1))
        await until(lambda: supervisor.num_waiting("writer") == 1, 3.0, "it waits for the fallback")
        process = stack.fake_worker("writer", *QUICK, worker_id="writer-w")
        assert (await asyncio.wait_for(held, 5))[0] == 200
        assert process.stop() == 0, "or the next test calls it, in vain"
    async with asking(stack, "large") as caller:
        status, body = await asyncio.wait_for(caller.whole(), 3)
        assert (status, body["error"]["code"]) == (503, "model_not_loaded")
        assert "no machine has the memory" in body["error"]["message"]


def is_wanted(supervisor: FakeSupervisor, model: str, num_elsewhere: int) -> bool:
    demand = supervisor.demand(model)
    return demand is not None and demand.num_elsewhere == num_elsewhere


async def test_a_model_is_loaded_while_a_fallback_serves_in_its_place(stack: Stack, supervisor: FakeSupervisor) -> None:
    process = stack.fake_worker("writer", *QUICK, worker_id="writer-w")
    supervisor.tell(large=ModelState(status="unloaded", why=Why.of("nobody calls it")))
    async with asking(stack, "large") as caller:
        await status_of(caller, reason="nobody calls it")
    async with asking(stack, "chain") as caller:
        for number in (1, 2):
            async with caller.session.post(f"{caller.url}/v1/chat/completions", json=caller.body()) as response:
                assert (response.status, response.headers["x-paddock-model"]) == (200, "writer")
            await until(partial(is_wanted, supervisor, "large", number), 2.0, "it is told")
        demand = supervisor.demand("large")
        assert demand is not None
        assert (demand.num_waiting, time.time() - demand.oldest_at < 5) == (0, True)
        supervisor.tell(large=TOO_LARGE)
    async with asking(stack, "large") as caller:
        await status_of(caller, reason="no machine has the memory")
        caller.model = "chain"
        assert (await caller.whole())[0] == 200, "the fallback serves on"
        await asyncio.sleep(0.6)
        assert is_wanted(supervisor, "large", 2), "what can't be loaded is not asked for"
    process.kill()


async def test_a_call_may_want_no_load(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "small") as caller:
        supervisor.tell(small=UNLOADED)
        await status_of(caller, value="unloaded")
        url = f"{caller.url}/v1/chat/completions"
        for word in ("false", "0"):
            began = time.monotonic()
            async with caller.session.post(f"{url}?autoload={word}", json=caller.body()) as response:
                assert response.status == 503
                error = (await response.json())["error"]
            assert time.monotonic() - began < 1.0
            assert error["code"] == "model_not_loaded"
            assert "autoload=false" in error["message"]
        async with caller.session.post(f"{caller.url}/v1/embeddings?autoload=false", json=caller.body()) as response:
            assert response.status in (400, 503)
        await asyncio.sleep(1.0)
        assert not supervisor.num_waiting("small"), "nobody wants it loaded"
        async with caller.session.post(f"{url}?autoload=perhaps", json=caller.body()) as response:
            assert response.status == 400
        # One that loads for others is waited for.
        supervisor.tell(small=loading(0.1))
        await status_of(caller, value="loading")

        async def post() -> int:
            async with caller.session.post(f"{url}?autoload=false", json=caller.body(max_tokens=1)) as response:
                return response.status

        held = asyncio.create_task(post())
        await until(lambda: supervisor.num_waiting("small") == 1, 2.0, "it waits")
        # Until that is given up.
        supervisor.tell(small=UNLOADED)
        assert await asyncio.wait_for(held, 3) == 503


async def refused_s(caller: Caller) -> tuple[float, dict[str, Any]]:
    """The seconds after which a call is refused, and its error."""
    began = time.monotonic()
    status, body = await asyncio.wait_for(caller.whole(max_tokens=1), 5)
    assert (status, body["error"]["code"]) == (503, "model_not_loaded")
    return time.monotonic() - began, body["error"]


async def test_a_call_that_nothing_loads_is_refused_at_once(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "coder") as caller:
        for state in (CLOSED, failed(), TOO_LARGE):
            supervisor.tell(coder=state)
            await status_of(caller, reason=state.why.whole)
            took_s, error = await refused_s(caller)
            assert state.why.whole in error["message"]
            assert took_s < AT_ONCE_S
        crowd = await asyncio.gather(*(refused_s(caller) for _ in range(20)))
        assert max(took_s for took_s, _ in crowd) < AT_ONCE_S
        # What waiting may change is waited for: the supervisor has to hear of the call first.
        supervisor.tell(coder=BY_ADMIN)
        await status_of(caller, reason=BY_ADMIN.why.whole)
        assert (await refused_s(caller))[0] > SETTLE_S - AWAITED_S


async def test_a_call_right_after_an_admin_s_load_waits(stack: Stack, supervisor: FakeSupervisor) -> None:
    """The supervisor has not told yet that it loads the model."""
    async with asking(stack, "late") as caller:
        supervisor.tell(late=CLOSED)
        await status_of(caller, reason=CLOSED.why.whole)
        assert await posted(caller, "/models/load") == (200, {"success": True})
        held = asyncio.create_task(caller.whole(max_tokens=1))
        await asyncio.sleep(AT_ONCE_S + 2 * AWAITED_S)
        assert not held.done()
        supervisor.tell(late=loading(0.5))
        process = stack.fake_worker("late", *QUICK, worker_id="late-w")
        assert (await asyncio.wait_for(held, 10))[0] == 200
        assert await posted(caller, "/models/unload") == (200, {"success": True})
        process.kill()


async def test_a_kept_model_that_an_admin_has_unloaded_refuses_at_once() -> None:
    with Stack() as stack, FakeSupervisor(stack.redis.url, {"kept": UNLOADED}) as supervisor:
        catalog = stack.folder / "catalog.yaml"
        catalog.write_text("models: [{name: kept, path: kept.gguf, residency: {min: 1}}]")
        stack.gateway(catalog=catalog, ready_wait_s=0.1, start_timeout_s=30)
        with redis.Redis.from_url(logged_in(stack.redis.url, "supervisor")) as client:
            client.set(keys.supervised("kept"), 1)
        async with asking(stack, "kept") as caller:
            await status_of(caller, value="unloaded")
            held = asyncio.create_task(caller.whole(max_tokens=1))
            await until(lambda: supervisor.num_waiting("kept") == 1, 2.0, "one that came before waits")
            assert await posted(caller, "/models/unload") == (200, {"success": True})
            took_s, error = await refused_s(caller)
            assert took_s < AT_ONCE_S
            assert "an admin has unloaded it" in error["message"]
            assert await posted(caller, "/models/load") == (200, {"success": True})
            process = stack.fake_worker("kept", *QUICK, worker_id="kept-w")
            assert (await asyncio.wait_for(held, 10))[0] == 200
            process.kill()


async def test_a_sleeping_model_is_shown_wakes_and_is_unloaded(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "sleepy") as caller, caller.session.get(f"{caller.url}/models/sse") as response:
        supervisor.tell(sleepy=ModelState(status="sleeping", why=Why.of("its weights are in memory")))
        assert (await Events(response).until("sleepy", "sleeping"))["data"]["reason"] == "its weights are in memory"
        await status_of(caller, value="sleeping")
        for _ in range(2):  # the second one finds the mark of the first
            assert await posted(caller, "/models/unload") == (200, {"success": True})
        assert (await got(caller, "/admin/explain?model=sleepy"))["residency"]["status"] == "sleeping"
        assert (await got(caller, "/admin/fleet"))["models"]["sleepy"]["status"] == "sleeping"
        # It wakes for whoever may not load it, too: it counts as loaded.
        url = f"{caller.url}/v1/chat/completions?autoload=false"
        held = asyncio.create_task(caller.session.post(url, json=caller.body(max_tokens=1)))
        await until(lambda: supervisor.num_waiting("sleepy") == 1, 2.0, "it waits")
        process = stack.fake_worker("sleepy", *QUICK, worker_id="sleepy-w")
        async with await asyncio.wait_for(held, 10) as answer:
            assert answer.status == 200
        process.kill()


async def test_an_admin_s_call_loads_what_calls_don_t(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "coder") as caller:
        supervisor.tell(coder=ModelState(status="unloaded", why=Why.of("nobody calls it")))
        await status_of(caller, reason="nobody calls it")
        url = f"{caller.url}/v1/chat/completions"

        async def post(word: str) -> int:
            async with caller.session.post(f"{url}?autoload={word}", json=caller.body(max_tokens=1)) as response:
                return response.status

        held = asyncio.create_task(post("true"))
        await until(lambda: supervisor.is_asked_for("coder"), 2.0, "it is asked for")
        process = stack.fake_worker("coder", *QUICK, worker_id="coder-w")
        assert await asyncio.wait_for(held, 10) == 200
        process.kill()


async def test_admins_load_and_unload(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "fast") as caller:
        supervisor.tell(fast=loading(0.5))
        status = await status_of(caller, value="loading")
        assert status["progress"] == {"stages": ["text_model"], "current": "text_model", "value": 0.5}
        assert status["reason"] == "1 call waits"
        assert await posted(caller, "/models/load") == (200, {"success": True})
        assert supervisor.is_asked_for("fast")
        assert await posted(caller, "/models/unload") == (200, {"success": True})
        assert not supervisor.is_asked_for("fast")
        assert supervisor.is_unloaded("fast")
        await until(lambda: not supervisor.is_unloaded("fast"), LIFE_S + 1, "supervisors have seen it")


class Events:
    """The events of `GET /models/sse`."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(HEARTBEAT_TTL_S + 5):
            async for line in self.response.content:
                if line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    return event
        raise AssertionError("the stream has ended")

    async def until(self, model: str, status: str) -> dict[str, Any]:
        while True:
            event = await self.next()
            if event["model"] == model and event["data"]["status"] == status:
                return event


async def test_listeners_hear_what_changes(stack: Stack, supervisor: FakeSupervisor) -> None:
    async with asking(stack, "other") as caller, caller.session.get(f"{caller.url}/models/sse") as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        events = Events(response)
        first = [await events.next() for _ in MODELS]
        assert {event["model"] for event in first} >= {"other", "fast"}
        assert {event["event"] for event in first} == {"model_status"}
        supervisor.tell(other=loading(0.25))
        event = await events.until("other", "loading")
        assert event["data"]["progress"]["value"] == 0.25
        process = stack.fake_worker("other", *QUICK, worker_id="other-w")
        await events.until("other", "loaded")
        supervisor.tell(other=UNLOADED)
        process.kill()
        await events.until("other", "unloaded")


async def test_listeners_are_bounded_and_need_a_key(stack: Stack) -> None:
    url = f"{stack.gateways[0].url}/models/sse"
    async with aiohttp.ClientSession() as stranger, stranger.get(url) as response:
        assert response.status == 401
    async with asking(stack, "other") as caller:
        opened = [await caller.session.get(url) for _ in range(MOST_PER_KEY)]
        assert [response.status for response in opened] == [200] * MOST_PER_KEY
        async with caller.session.get(url) as response:
            assert response.status == 429
            assert "listen to news of models" in (await response.json())["error"]["message"]
        for response in opened:
            response.close()
        async with asyncio.timeout(5):
            while True:
                async with caller.session.get(url) as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)


async def test_all_keys_of_a_team_leave_listeners_to_others(stack: Stack) -> None:
    names = [f"red-{number}" for number in range(MOST_PER_TEAM // MOST_PER_KEY + 1)]
    records = [{"name": name, "team": "red", "sha256": digest(f"pk-{name}-0123456789")} for name in names]
    gateway = stack.gateway(catalog=stack.folder / "catalog.yaml", api_keys=json.dumps(records))
    async with AsyncExitStack() as held:
        for name in names[:-1]:
            caller = await held.enter_async_context(calling(gateway.url, f"pk-{name}-0123456789", "other"))
            opened = [await caller.session.get(f"{caller.url}/models/sse") for _ in range(MOST_PER_KEY)]
            assert [response.status for response in opened] == [200] * MOST_PER_KEY
            for response in opened:
                held.callback(response.close)
        last = await held.enter_async_context(calling(gateway.url, f"pk-{names[-1]}-0123456789", "other"))
        async with last.session.get(f"{last.url}/models/sse") as response:
            assert response.status == 429
            assert "The team 'red' has 48 connections open here" in (await response.json())["error"]["message"]
        other = await held.enter_async_context(calling(gateway.url, stack.key, "other"))
        async with other.session.get(f"{other.url}/models/sse") as response:
            assert response.status == 200


async def test_a_crowd_that_lists_models_asks_redis_once_for_all(stack: Stack, supervisor: FakeSupervisor) -> None:
    """Of each model two keys are looked up."""
    with redis.Redis.from_url(stack.redis.url) as client:

        def num_lookups() -> int:
            told: Any = client.info("commandstats")
            return int(told.get("cmdstat_exists", {"calls": 0})["calls"])

        async with asking(stack, "other") as caller:
            await got(caller, "/v1/models")
            await asyncio.sleep(2 * FRESH_S)  # or the crowd is answered by the look that this call had made
            before, began = num_lookups(), time.monotonic()
            await asyncio.gather(*(got(caller, "/v1/models") for _ in range(100)))
            looks = 2 + (time.monotonic() - began) / FRESH_S
            assert 0 < num_lookups() - before <= looks * 2 * len(MODELS)


async def test_a_stream_of_news_ends_with_its_gateway(stack: Stack) -> None:
    gateway = stack.gateway(catalog=stack.folder / "catalog.yaml", drain_s=20)
    stack.gateways.remove(gateway)
    async with (
        calling(gateway.url, stack.key, "other") as caller,
        caller.session.get(f"{caller.url}/models/sse") as response,
    ):
        began = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
        async with asyncio.timeout(10):
            await response.content.read()
        assert await stopping == 0
    assert time.monotonic() - began < 8
