"""What a scraper gets of a gateway and of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import pytest

from gateway.commands.config import gateway_groups, metrics_of, worker_groups
from tests.integration.front.conftest import NARROW, NARROW_KEY, QUEUE_TIMEOUT_S
from tests.support.caller import Caller, taken
from tests.support.scrape import Scrape
from tests.support.stack import Stack

NOBODY: Mapping[str, str] = {}


async def scraped(caller: Caller, url: str = "", headers: Mapping[str, str] = NOBODY) -> Scrape:
    async with caller.session.get(f"{url or caller.url}/metrics", headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return Scrape(await response.text())


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


async def test_a_gateway_shows_what_is_declared(caller: Caller) -> None:
    await caller.whole()
    shown = await scraped(caller)
    shown.has_exactly(metrics_of(gateway_groups()))
    assert shown.value("paddock_workers", model="quick") == 1
    assert shown.value("paddock_workers_draining", model="quick") == 0
    assert shown.value("paddock_slots", model="quick") == 8
    assert shown.value("paddock_redis_up") == 1
    assert shown.value("paddock_without_redis", model="quick") == 0
    assert shown.value("paddock_stopping") == 0
    assert shown.value("paddock_redis_seconds_count", script="acquire") >= 1
    assert shown.value("process_resident_memory_bytes") > 1e6
    assert shown.sum("paddock_build_info") == 1

    async def lag_was_measured() -> bool:
        return (await scraped(caller)).value("paddock_loop_lag_seconds_count") >= 1

    await eventually(lag_was_measured, 5.0)


async def test_workers_are_found_and_show_what_is_declared(caller: Caller, stack: Stack) -> None:
    async with caller.session.get(f"{caller.url}/metrics/targets", headers={"authorization": ""}) as response:
        assert (response.status, response.content_type) == (200, "application/json")
        groups = {group["labels"]["worker"]: group for group in await response.json()}
    assert {"quick-a", "slow-a", "vectors-a"} <= groups.keys()
    assert groups["quick-a"]["labels"] == {"model": "quick", "worker": "quick-a"}
    beat = stack.heartbeat("quick", "quick-a")
    assert beat is not None
    assert [f"http://{target}" for target in groups["quick-a"]["targets"]] == [beat.address]
    for worker in ("quick-a", "vectors-a"):
        (target,) = groups[worker]["targets"]
        shown = await scraped(caller, f"http://{target}")
        shown.has_exactly(metrics_of(worker_groups()))
        assert shown.sum("paddock_worker_info", worker=worker) == 1, "each process answers for itself"
        assert shown.value("paddock_worker_draining", model_name=worker.removesuffix("-a")) == 0


async def test_what_a_caller_writes_is_no_label(caller: Caller) -> None:
    strange = "no-such-thing-3f9c"
    async with caller.session.get(f"{caller.url}/{strange}") as response:
        assert response.status == 404
    assert (await caller.whole(model=strange))[0] == 404
    assert (await caller.whole(user=strange, metadata={strange: strange}))[0] == 200
    async with caller.session.get(f"{caller.url}/v1/models", headers={"authorization": strange}) as response:
        assert response.status == 401
    await asyncio.sleep(0.05)
    async with caller.session.get(f"{caller.url}/metrics") as response:
        assert strange not in await response.text()
    shown = await scraped(caller)
    assert shown.value("paddock_failures_total", model="", who="caller", code="model_not_found") >= 1
    assert shown.value("paddock_failures_total", model="", who="caller", code="unknown_route") >= 1


async def test_tokens_of_an_answer_that_is_cut_off_count(caller: Caller) -> None:
    """Or a team whose callers always leave used nothing."""
    caller.model = "slow"
    names = ("paddock_prompt_tokens_total", "paddock_generated_tokens_total")
    before = [(await scraped(caller)).sum(name, model="slow") for name in names]
    async with caller.stream() as answer:
        while len(answer.text.split()) < 5:
            await answer.until_text()

    async def counted() -> bool:
        shown = await scraped(caller)
        prompt, generated = (shown.sum(name, model="slow") - then for name, then in zip(names, before, strict=True))
        return prompt > 0 and 5 <= generated < 50

    await eventually(counted, 2.0)


async def test_answers_side_by_side_have_no_common_time_per_token(caller: Caller) -> None:
    caller.model, name = "quick", "paddock_time_per_output_token_seconds_count"
    before = (await scraped(caller)).sum(name, model="quick")
    assert (await caller.whole(n=3))[0] == 200
    await asyncio.sleep(0.05)
    assert (await scraped(caller)).sum(name, model="quick") == before
    assert (await caller.whole())[0] == 200

    async def counted() -> bool:
        return (await scraped(caller)).sum(name, model="quick") == before + 1

    await eventually(counted, 1.0)


async def test_several_answers_that_wait_in_vain_have_waited(caller: Caller) -> None:
    caller.model, name = "slow", "paddock_queue_wait_seconds_sum"
    async with taken(caller, 2):
        before = (await scraped(caller)).sum(name, model="slow")
        status, body = await caller.whole(n=2)
        assert (status, body["error"]["code"]) == (503, "queue_timeout")
    waited_s = (await scraped(caller)).sum(name, model="slow") - before
    assert waited_s > 0.9 * QUEUE_TIMEOUT_S


async def test_a_model_without_workers_has_its_series_and_shows_who_waits(other_caller: Caller) -> None:
    """What an autoscaler reads: there before the first call, up with one that is held, down when it leaves."""
    caller, model = other_caller, "absent"
    gauges = ("queue_length", "queue_oldest_seconds", "predicted_wait_seconds", "workers", "slots", "leases")
    shown = await scraped(caller)
    assert [shown.value(f"paddock_{name}", model=model) for name in gauges] == [0] * len(gauges)
    held = asyncio.create_task(caller.whole(model=model))
    await asyncio.sleep(0.3)
    shown = await scraped(caller)
    assert shown.value("paddock_queue_length", model=model) == 1
    assert shown.value("paddock_requests_in_flight", model=model) == 1
    oldest_s = shown.value("paddock_queue_oldest_seconds", model=model)
    assert 0.1 < oldest_s < 5
    assert shown.value("paddock_predicted_wait_seconds", model=model) == oldest_s
    held.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await held

    async def left() -> bool:
        return (await scraped(caller)).value("paddock_queue_length", model=model) == 0

    await eventually(left, 1.0)
    after = await scraped(caller)
    assert after.value("paddock_requests_in_flight", model=model) == 0
    assert after.value("paddock_predicted_wait_seconds", model=model) == 0


async def test_scrapes_that_come_together_and_zipped_ones_say_the_same(caller: Caller) -> None:
    pages = await asyncio.gather(*(scraped(caller) for _ in range(20)))
    assert len({frozenset(page.kinds.items()) for page in pages}) == 1
    async with caller.session.get(f"{caller.url}/metrics", headers={"accept-encoding": "gzip"}) as response:
        assert response.headers["content-encoding"] == "gzip"
        zipped = Scrape(await response.text())
    assert zipped.kinds == pages[0].kinds
    async with caller.session.get(f"{caller.url}/metrics", headers={"accept-encoding": "identity"}) as response:
        assert "content-encoding" not in response.headers


async def test_a_version_that_is_none_gets_the_plain_text(caller: Caller) -> None:
    """The library that chooses the format raised: a 500 and a traceback in the log, by anybody without a key."""
    async with caller.session.get(f"{caller.url}/metrics", headers={"accept": "text/plain;version=x"}) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert Scrape(await response.text()).kinds


@pytest.mark.parametrize("path", ["/metrics", "/metrics/targets"])
async def test_a_scrape_leaves_no_trace_in_what_is_scraped(caller: Caller, path: str) -> None:
    before = (await scraped(caller)).sum("paddock_requests_total")
    async with caller.session.get(f"{caller.url}{path}") as response:
        await response.read()
    assert (await scraped(caller)).sum("paddock_requests_total") == before


async def test_a_worker_that_is_stopped_has_drained(caller: Caller, stack: Stack) -> None:
    worker = stack.fake_worker("fleeting", worker_id="fleeting-a")

    async def counted(name: str, wanted: float, **labels: str) -> bool:
        return (await scraped(caller)).sum(name, model="fleeting", **labels) == wanted

    await eventually(lambda: counted("paddock_worker_starts_total", 1), 10.0)
    assert await counted("paddock_workers", 1)
    worker.stop()
    await eventually(lambda: counted("paddock_worker_losses_total", 1, how="drained"), 10.0)
    assert await counted("paddock_workers", 0)
    assert await counted("paddock_worker_losses_total", 0, how="lost")


async def test_metrics_want_a_key_where_one_is_set(stack: Stack) -> None:
    """Counters of teams tell others how long their prompts are."""
    gateway = stack.gateway(metrics_key="mk-0123456789", api_keys=json.dumps([NARROW]))
    try:
        async with aiohttp.ClientSession() as session:
            for path in ("/metrics", "/metrics/targets"):
                told: dict[str, int] = {}
                for key in ("", "mk-0123456789", "mk-0123456780", NARROW_KEY, stack.key):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    async with session.get(gateway.url + path, headers=headers) as response:
                        told[key] = response.status
                assert list(told.values()) == [401, 200, 401, 403, 200]
            for path in ("/health", "/ready"):
                async with session.get(gateway.url + path) as response:
                    assert response.status == 200
    finally:
        gateway.stop()
        stack.gateways.remove(gateway)
