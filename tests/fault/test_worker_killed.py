"""`kill -9` of a worker: what had not started finishes elsewhere, what ran ends in-stream, nothing stays leased."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.fault.rest import at_rest
from tests.support.caller import calling
from tests.support.stack import Stack
from tests.support.waiting import until

MODEL = "pool"


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running


async def test_a_call_that_has_not_started_finishes_on_the_other_worker(stack: Stack) -> None:
    hung = stack.fake_worker(MODEL, "--hang", worker_id="hung", slots=4)
    gateway = stack.gateway()
    async with calling(gateway.url, stack.key, MODEL) as caller, asyncio.TaskGroup() as group:
        waiting = [group.create_task(caller.whole()) for _ in range(3)]
        await until(lambda: stack.leases(MODEL) == 3, 5, "three calls hold slots of the hung worker")
        stack.fake_worker(MODEL, "--step-ms", "5", "--tokens", "8", worker_id="well", slots=4)
        hung.kill()
        answers = await asyncio.gather(*waiting)
    assert [status for status, _ in answers] == [200, 200, 200]
    assert all(body["usage"]["completion_tokens"] == 8 for _, body in answers)
    await at_rest(stack, MODEL, within_s=5)


async def test_a_call_that_ends_its_workers_does_not_end_them_all(stack: Stack) -> None:
    """They die in the first step, before the call has begun: it is tried once more, and then given up."""
    names = ("first", "second", "third")
    workers = [stack.fake_worker(MODEL, "--die-after", "1", worker_id=name, slots=2) for name in names]
    gateway = stack.gateway()
    async with calling(gateway.url, stack.key, MODEL) as caller:
        status, body = await caller.whole()
    assert (status, body["error"]["code"]) == (502, "worker_lost")
    assert sorted(worker.popen.poll() is None for worker in workers) == [False, False, True]
    await at_rest(stack, MODEL)


async def test_running_streams_end_with_an_error_and_others_are_untouched(stack: Stack) -> None:
    flags = ("--step-ms", "20", "--tokens", "400")
    doomed = stack.fake_worker(MODEL, *flags, worker_id="doomed", slots=2)
    gateway = stack.gateway()
    async with calling(gateway.url, stack.key, MODEL) as caller:
        async with caller.stream() as first, caller.stream() as second:
            await asyncio.gather(first.until_text(), second.until_text())
            stack.fake_worker(MODEL, *flags, worker_id="other", slots=2)
            await asyncio.sleep(1.2)  # until the gateway's snapshot has it
            async with caller.stream() as third:
                await third.until_text()
                doomed.kill()
                await asyncio.wait_for(asyncio.gather(first.finish(), second.finish(), third.finish()), 20)
        for stream in (first, second):
            assert stream.error is not None
            assert stream.error["code"] == "worker_lost"
            assert stream.done
            assert stream.text
        assert third.error is None
        assert third.finish_reason == "stop"
    await at_rest(stack, MODEL, within_s=5)


async def test_a_frozen_worker_is_noticed(stack: Stack) -> None:
    """SIGSTOP: the connection stays open and nothing comes; the heartbeat and the read timeout tell."""
    frozen = stack.fake_worker(MODEL, "--step-ms", "20", "--tokens", "500", worker_id="frozen", slots=2)
    gateway = stack.gateway()
    async with calling(gateway.url, stack.key, MODEL) as caller, caller.stream() as stream:
        await stream.until_text()
        frozen.signal(signal.SIGSTOP)
        try:
            await asyncio.wait_for(stream.finish(), 20)
        finally:
            frozen.signal(signal.SIGCONT)
    assert stream.error is not None
    assert stream.error["code"] == "worker_lost"
    await at_rest(stack, MODEL)
