"""The desk for pooled work: what it tokenises, and when it stops doing so."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from tests.support.fake_pooled import FakeInputs, FakePooledEngine
from tests.support.waiting import until
from workers.llama.pooling import Pooling
from workers.protocol.failures import CallFailed, FailureCode
from workers.protocol.pooled import PoolRequest
from workers.service.pooled import PooledDesk


class CountedInputs(FakeInputs):
    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def of_pair(self, query: str, document: str) -> list[int]:
        self.num_read += 1
        self.may_go_on.wait(10)
        return super().of_pair(query, document)


def desk_of(inputs: FakeInputs) -> PooledDesk:
    desk = PooledDesk(inputs, pooling=Pooling.RANK, width=1)
    desk.connect(FakePooledEngine(2, 64, 1, desk.tell))
    return desk


async def test_a_query_that_is_too_long_is_read_once() -> None:
    inputs = CountedInputs()
    with pytest.raises(CallFailed) as caught:
        await desk_of(inputs).pool(PoolRequest(kind="rank", query="long " * 1000, inputs=("a",) * 500))
    assert caught.value.failure.code is FailureCode.CONTEXT_OVERFLOW
    assert inputs.num_read == 1


async def test_a_query_is_read_with_so_many_documents() -> None:
    """One of half a context, with two thousand documents of a letter, had gigabytes of tokens."""
    inputs = CountedInputs()
    with pytest.raises(CallFailed, match="`query` has 5000 characters and is read with each of 2048 documents") as told:
        await desk_of(inputs).pool(PoolRequest(kind="rank", query="q" * 5000, inputs=("a",) * 2048))
    assert (told.value.failure.param, inputs.num_read) == ("query", 0)


async def test_a_call_that_the_engine_refuses_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "workers.service.call_story")
    with pytest.raises(CallFailed):
        await desk_of(FakeInputs()).pool(PoolRequest(kind="rank", query="long " * 1000, inputs=("a",)))
    (line,) = caplog.records
    assert vars(line)["fields"]["outcome"] == FailureCode.CONTEXT_OVERFLOW.value


async def test_nothing_more_is_read_for_one_who_has_gone() -> None:
    inputs = CountedInputs()
    inputs.may_go_on.clear()
    asked = PoolRequest(kind="rank", query="why", inputs=("because " * 10,) * 500)
    waiting = asyncio.create_task(desk_of(inputs).pool(asked))
    await until(lambda: inputs.num_read == 1, 5.0, "it is read")
    waiting.cancel()
    await asyncio.wait({waiting})
    inputs.may_go_on.set()
    await asyncio.sleep(0.05)
    assert inputs.num_read == 1


async def test_all_are_read_otherwise() -> None:
    inputs = CountedInputs()
    result = await desk_of(inputs).pool(PoolRequest(kind="rank", query="why", inputs=("because " * 10,) * 500))
    assert (len(result.rows), inputs.num_read) == (500, 500)
