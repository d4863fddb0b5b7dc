"""The whole of Paddock on a Redis as sites run it, with one of its servers killed under running streams."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from gateway.admission.admission import KNOWN_AFTER_S
from tests.fault.rest import at_rest
from tests.support.caller import Caller, calling, seen
from tests.support.redis_fleet import ClusterFleet, SentinelFleet
from tests.support.stack import Stack
from workers.protocol import keys

TOKENS = 120


async def served_again(caller: Caller, within_s: float) -> None:
    """Returns when a call is answered whole; those before it may have been refused, as by a service in trouble."""
    deadline = time.monotonic() + within_s
    while True:
        status, answer = await caller.whole(max_tokens=3)
        if status == 200:
            return
        assert status == 503, answer
        assert time.monotonic() < deadline, f"not served within {within_s:g} s: {answer}"
        await asyncio.sleep(0.1)


@pytest.mark.long
async def test_a_failover_in_the_middle_of_streams() -> None:
    with SentinelFleet(password="hush", sentinels=3) as site, Stack(site=site.url) as stack:
        stack.fake_worker("pool", "--step-ms", "20", "--tokens", str(TOKENS), slots=4, wait=False)
        gateway = stack.gateway()
        async with calling(gateway.url, stack.key, "pool") as caller:
            await seen(caller, 1)
            async with caller.stream() as one, caller.stream() as two:
                await asyncio.gather(one.until_text(), two.until_text())
                site.first.kill()
                await asyncio.gather(one.finish(), two.finish())
            for stream in (one, two):
                assert stream.error is None
                assert stream.usage is not None
                assert stream.usage["completion_tokens"] == TOKENS
            await asyncio.to_thread(site.wait_for_failover)
            await served_again(caller, 5.0)
        await at_rest(stack, "pool", url=site.second.url.replace("://", "://:hush@"))
        for process in stack.processes:
            assert "hush" not in process.text()


@pytest.mark.long
async def test_a_cluster_whose_models_lie_on_different_masters() -> None:
    with ClusterFleet() as site, Stack(site=site.url) as stack:
        names: dict[int, str] = {}
        for n in range(100):
            names.setdefault(site.owner(f"pd:{{m{n}}}:").port, f"m{n}")
        for name in names.values():
            stack.fake_worker(name, "--step-ms", "5", "--tokens", str(TOKENS), slots=2, wait=False)
        gateway = stack.gateway()
        await asyncio.sleep(KNOWN_AFTER_S + keys.GATEWAY_INTERVAL_S)
        async with AsyncExitStack() as opened:
            callers = [await opened.enter_async_context(calling(gateway.url, stack.key, n)) for n in names.values()]
            for caller in callers:
                await seen(caller, 1)
            streams = [await opened.enter_async_context(caller.stream()) for caller in callers]
            await asyncio.gather(*(stream.until_text() for stream in streams))
            gone = site.masters[0]
            gone.kill()
            await asyncio.gather(*(stream.finish() for stream in streams))
            for stream in streams:
                assert stream.usage is not None
                assert stream.usage["completion_tokens"] == TOKENS
            for caller in callers:  # also the one whose model's data is gone: its calls are placed without
                await served_again(caller, 3.0)
            assert f"for model {names[gone.port]}: placing calls" in gateway.text()
            assert gateway.text().count(": placing calls") == 1
        for server in site.masters[1:]:
            await at_rest(stack, names[server.port], url=server.url)
