"""Trouble between a request and its end: clients that vanish or read slowly, queues, workers that fail or die."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from tests.integration.front.conftest import QUEUE_TIMEOUT_S, REQUEST_TIMEOUT_S
from tests.support.caller import Caller, seen, taken
from tests.support.stack import Process, Stack
from tests.support.waiting import until

GONE_S = 0.5
"""Bound for a freed place on a busy machine: 100 ms after the next step, with room for two processes on one core."""


def busy(stack: Stack, model: str) -> int:
    beat = stack.heartbeat(model, f"{model}-a")
    assert beat is not None
    return beat.slots_busy


async def test_a_client_that_vanishes_while_streaming(caller: Caller, stack: Stack) -> None:
    caller.model = "slow"
    async with taken(caller, 2):
        assert stack.leases("slow") == 2
    await until(lambda: stack.leases("slow") == 0, GONE_S, "both leases are given back")
    await until(lambda: busy(stack, "slow") == 0, 2.0, "the worker has stopped both answers")


async def test_a_client_that_vanishes_while_a_whole_answer_is_made(caller: Caller, stack: Stack) -> None:
    caller.model = "slow"
    asking = asyncio.create_task(caller.whole())
    await until(lambda: stack.leases("slow") == 1, 2.0, "the call holds a slot")
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: stack.leases("slow") == 0, GONE_S, "the lease is given back")


async def test_a_client_that_vanishes_while_queued(caller: Caller, stack: Stack) -> None:
    caller.model = "slow"
    async with taken(caller, 2) as streams:
        waiting = asyncio.create_task(caller.whole(max_tokens=1))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.05)
        streams[0].response.close()
        # The freed slot goes to the next caller at once, not to the one that has left.
        began = time.monotonic()
        status, _ = await caller.whole(max_tokens=1)
        assert status == 200
        assert time.monotonic() - began < QUEUE_TIMEOUT_S
    await until(lambda: stack.leases("slow") == 0, GONE_S, "every lease is given back")


async def test_a_queued_caller_is_served_when_a_slot_comes_free(
    caller: Caller, other_caller: Caller, stack: Stack
) -> None:
    caller.model = other_caller.model = "slow"
    async with taken(caller, 2) as streams:
        waiting = asyncio.create_task(other_caller.whole(max_tokens=1))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        streams[0].response.close()
        status, _ = await waiting
        assert status == 200


async def test_pings_while_queued_then_an_in_stream_error(caller: Caller) -> None:
    caller.model = "slow"
    async with taken(caller, 2), caller.stream() as waiting:
        assert waiting.status == 200
        await waiting.finish()
    assert waiting.comments >= 3
    assert waiting.chunks == []
    assert waiting.error is not None
    assert (waiting.error["type"], waiting.error["code"]) == ("unavailable_error", "queue_timeout")
    assert waiting.done


async def test_pings_while_queued_then_an_answer(caller: Caller) -> None:
    caller.model = "slow"
    async with taken(caller, 2) as streams, caller.stream(max_tokens=2) as waiting:
        reading = asyncio.create_task(waiting.finish())
        await asyncio.sleep(0.6)
        streams[1].response.close()
        await reading
    assert waiting.comments >= 1
    assert waiting.text == "t0 t1 "
    assert waiting.done
    assert waiting.error is None


async def test_a_queue_timeout_has_a_status_when_nothing_was_sent(caller: Caller) -> None:
    caller.model = "slow"
    async with taken(caller, 2):
        url = f"{caller.url}/v1/chat/completions"
        async with caller.session.post(url, json=caller.body()) as response:
            body = await response.json()
    assert response.status == 503
    assert body["error"]["code"] == "queue_timeout"
    assert int(response.headers["retry-after"]) >= 1


async def test_a_full_queue_is_a_429(caller: Caller) -> None:
    caller.model = "slow"
    async with taken(caller, 2):
        waiting = [asyncio.create_task(caller.whole(max_tokens=1)) for _ in range(2)]
        await asyncio.sleep(0.2)
        async with caller.session.post(f"{caller.url}/v1/chat/completions", json=caller.body()) as response:
            body = await response.json()
        assert (response.status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_a_model_that_no_worker_serves_is_waited_for(other_caller: Caller) -> None:
    other_caller.model = "later"
    status, body = await other_caller.whole()
    assert (status, body["error"]["code"]) == (503, "queue_timeout")
    assert "no worker" in body["error"]["message"]


async def test_a_request_that_takes_too_long_ends_with_an_error(other_caller: Caller, stack: Stack) -> None:
    other_caller.model = "slow"
    async with other_caller.stream() as stream:
        await stream.finish()
    assert stream.text.startswith("t0 t1 ")
    assert stream.error is not None
    assert stream.error["code"] == "request_timeout"
    assert f"{REQUEST_TIMEOUT_S:g} s" in stream.error["message"]
    await until(lambda: stack.leases("slow") == 0, GONE_S, "the lease is given back")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_after_the_first_token(caller: Caller, stack: Stack, stream: bool) -> None:
    caller.model = "failing"
    if stream:
        async with caller.stream() as answer:
            await answer.finish()
        assert answer.status == 200
        assert answer.text == "t0 t1 t2 "
        assert answer.error is not None
        error = answer.error
        assert answer.done
    else:
        status, body = await caller.whole()
        assert status == 500
        error = body["error"]
    assert (error["type"], error["code"]) == ("internal_error", "internal_error")
    assert "--fail-after" in error["message"]
    await until(lambda: stack.leases("failing") == 0, GONE_S, "the lease is given back")


async def test_a_worker_that_refuses_is_passed_over(caller: Caller, stack: Stack) -> None:
    """Its calls are placed again on another worker before anything was sent."""
    model = caller.model = "mixed"
    willing = stack.fake_worker(model, "--step-ms", "2", "--tokens", "3", worker_id=f"{model}-b", wait=False)
    refusing = stack.fake_worker(model, "--refuse", "draining", worker_id=f"{model}-a")
    await seen(caller, 2)
    attempts = []
    for _ in range(4):
        async with caller.stream() as answer:
            await answer.finish()
        assert answer.text == "t0 t1 t2 "
        assert answer.response.headers["x-paddock-worker"] == f"{model}-b"
        attempts.append(int(answer.response.headers["x-paddock-attempts"]))
    assert max(attempts) == 2
    refusing.kill()
    willing.kill()


async def test_a_worker_that_dies_between_accepting_and_starting(caller: Caller, stack: Stack) -> None:
    """Its call has been submitted, has outlasted the bound for queueing, and is answered by the other worker."""
    caller.model = "hanging"
    doomed = stack.fake_worker("hanging", "--hang", worker_id="hanging-a")
    await seen(caller, 1)
    asking = asyncio.create_task(caller.whole(max_tokens=2))
    await until(lambda: stack.leases("hanging") == 1, 2.0, "the call holds a slot of the worker that hangs")
    asked = time.monotonic()
    heir = stack.fake_worker("hanging", "--step-ms", "2", worker_id="hanging-b")
    await seen(caller, 2)
    await asyncio.sleep(max(0.0, QUEUE_TIMEOUT_S + 0.1 - (time.monotonic() - asked)))
    doomed.kill()
    status, body = await asking
    assert (status, body["choices"][0]["message"]["content"]) == (200, "t0 t1 ")
    heir.kill()


async def test_a_slow_reader_is_cut_off_and_frees_its_place(caller: Caller, stack: Stack, gateway: Process) -> None:
    """Its bounded buffer fills; nobody else notices."""
    body = json.dumps({"model": "flood", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, (host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\n"
        await loop.sock_sendall(slow, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await loop.sock_recv(slow, 100)
        await until(lambda: stack.leases("flood") == 1, 2.0, "the stream is under way")
        caller.model = "quick"
        assert (await caller.whole())[0] == 200
        await until(lambda: stack.leases("flood") == 0, 20.0, "the slow reader is cut off")
    await until(lambda: '"client_too_slow"' in gateway.text(), 5.0, "the log says why")
    await until(lambda: busy(stack, "flood") == 0, 2.0, "the worker has stopped")
