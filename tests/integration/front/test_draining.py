"""A gateway that is taken out of service: nobody new is sent to it, and nobody who comes is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed

from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller, calling, seen, taken
from tests.support.socket_caller import connected
from tests.support.stack import Process, Stack
from workers.protocol.control import gateway_drain_token
from workers.protocol.exits import Exit

QUICKLY_S = 10.0


@contextmanager
def one_more(stack: Stack, **settings: Any) -> Iterator[Process]:
    process = stack.gateway(**settings)
    stack.gateways.remove(process)
    try:
        yield process
    finally:
        process.stop()


async def drained(caller: Caller, query: str = "", key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with caller.session.post(f"{caller.url}/health/drain{query}", headers=headers) as response:
        return response.status, await response.json()


async def looked(caller: Caller, path: str) -> tuple[int, Mapping[str, str]]:
    async with caller.session.get(f"{caller.url}{path}") as response:
        return response.status, response.headers


async def test_calls_are_answered_until_the_end(stack: Stack) -> None:
    with one_more(stack) as process:
        async with calling(process.url, stack.key, "slow") as caller:
            async with caller.stream(max_tokens=100) as stream:
                await stream.until_text()
                status, answer = await drained(
                    caller, "?timeout_s=0.3&settle_s=0", gateway_drain_token(stack.gateway_secret)
                )
                assert (status, answer["status"], answer["calls"]) == (200, "draining", 1), (
                    "it runs, and could not wait"
                )
                draining = asyncio.create_task(drained(caller, "?settle_s=0.2"))
                assert (await looked(caller, "/ready"))[0] == 503
                assert (await looked(caller, "/health"))[0] == 200
                caller.model = "quick"
                async with caller.session.post(f"{caller.url}/v1/chat/completions", json=caller.body()) as late:
                    assert late.status == 200
                    assert late.headers["connection"] == "close"
                async with caller.stream() as other:
                    await other.finish()
                    assert other.response.headers["connection"] == "close"
                assert not draining.done(), "the first stream runs"
                assert await stopping_gauge(caller) == 1
                await stream.finish()
                assert (stream.error, stream.finish_reason) == (None, "length")
            status, answer = await draining
            assert (status, answer["status"], answer["calls"]) == (200, "drained", 0)
        assert process.stop(QUICKLY_S) == Exit.OK


async def stopping_gauge(caller: Caller) -> float:
    async with caller.session.get(f"{caller.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return next(family.samples[0].value for family in families if family.name == "paddock_stopping")


async def test_somebody_new_must_not_have_come_for_a_while(stack: Stack) -> None:
    with one_more(stack) as process:
        async with calling(process.url, stack.key, "quick") as caller:
            began = time.monotonic()
            draining = asyncio.create_task(drained(caller, "?settle_s=0.6"))
            for _ in range(4):
                await asyncio.sleep(0.3)
                last = time.monotonic()
                assert (await caller.whole(max_tokens=1))[0] == 200
            await draining
            assert time.monotonic() - last >= 0.55
            assert time.monotonic() - began >= 1.7


async def test_only_who_runs_it_may_drain_it(caller: Caller, stack: Stack) -> None:
    async with calling(caller.url, NARROW_KEY, "quick") as anybody:
        assert (await drained(anybody))[0] == 403
    assert (await drained(caller, key="wrong"))[0] == 401
    for secret in (stack.secret, stack.gateway_secret, gateway_drain_token(stack.secret)):
        assert (await drained(caller, key=secret))[0] == 401, "no secret itself, and nothing that workers could make"
    async with caller.session.get(f"{caller.url}/health/drain") as response:
        assert response.status == 405
    for wrong in ("?timeout_s=soon", "?settle_s=-1", "?timeout_s=nan"):
        status, body = await drained(caller, wrong)
        assert (status, body["error"]["param"]) == (400, wrong[1:].partition("=")[0])
    assert (await looked(caller, "/ready"))[0] == 200, "nobody has drained it"


async def test_sockets_are_led_elsewhere_when_they_have_been_answered(stack: Stack) -> None:
    with one_more(stack) as process:
        async with (
            calling(process.url, stack.key, "slow") as caller,
            connected(process.url, stack.key, "slow") as busy,
            connected(process.url, stack.key, "slow") as idle,
        ):
            await busy.ask(input="Hi", max_output_tokens=40, store=False)
            await busy.until("response.output_text.delta")
            draining = asyncio.create_task(drained(caller, "?settle_s=0.1"))
            with pytest.raises(ConnectionClosed) as closed:
                await idle.connection.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            assert (await busy.rest())[-1]["type"] == "response.incomplete"
            assert (await draining)[1]["status"] == "drained"


def hook(stack: Stack, *args: str) -> tuple[int, str]:
    """What `paddock drain` ends with and says."""
    command = [sys.executable, "-m", "gateway.cli", "drain", *args]
    done = subprocess.run(command, env=stack.environment(), capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout + done.stderr


async def test_the_hook_of_a_container(stack: Stack) -> None:
    with one_more(stack) as process:
        port = process.url.rpartition(":")[2]
        code, told = hook(stack, "gateway", "--port", port, "--settle-s", "0.1")
        assert (code, told.startswith("paddock: drained after 0.")) == (Exit.OK, True)
    worker = stack.fake_worker("hooked", "--step-ms", "50", "--tokens", "4000", worker_id="hooked-w")
    stack.workers.remove(worker)
    async with calling(stack.gateways[0].url, stack.key, "hooked") as caller, AsyncExitStack() as held:
        await seen(caller, 1)
        [stream] = await held.enter_async_context(taken(caller, 1))
        reading = asyncio.create_task(stream.finish())
        code, told = await asyncio.to_thread(hook, stack, "worker", "--url", worker.url, "--timeout-s", "0.2")
        assert (code, "1 calls run" in told) == (Exit.DRAIN_CUT, True), told
        reading.cancel()
        await asyncio.wait([reading])
        async with caller.session.get(f"{worker.url}/ready") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
    code, told = await asyncio.to_thread(hook, stack, "worker", "--url", worker.url, "--worker-secret", "wrong")
    assert (code, "PADDOCK_WORKER_SECRET" in told) == (Exit.USAGE, True)
    assert worker.stop(QUICKLY_S) == Exit.OK
    code, told = await asyncio.to_thread(hook, stack, "worker", "--url", worker.url)
    assert (code, "does not answer" in told) == (Exit.CRASHED, True)
