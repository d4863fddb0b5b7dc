"""Several answers to one request: in turns where they are many, all or nothing where one fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gateway.dispatch.fan_out import MAX_AT_ONCE, start_answers, usage_of
from gateway.dispatch.pipeline import Pipeline
from gateway.errors import PaddockError, QueueTimeout
from gateway.relay.mailbox import Mailbox
from gateway.telemetry.request_log import RequestLog
from tests.support.pool import call
from workers.protocol.events import Failed, Failure, FailureCode, Finished, FinishReason, Started, Text, Timings, Usage
from workers.protocol.requests import GenerateRequest

TIMINGS = Timings(0, 1, 1.0, 1, 1.0)
STEP_S = 0.002


class Corridor:
    """As much of a pipeline as answers need: each call is placed at once and says its prompt."""

    def __init__(self, *, failing: int = -1, refused: int = -1) -> None:
        self.open = self.most = 0
        self.patience: dict[str, float] = {}
        """Prompt -> seconds that the call may wait for a slot when its turn comes."""
        self._failing, self._refused = str(failing), str(refused)

    @asynccontextmanager
    async def permitted(self, asked: Any, requests: object, request_log: object) -> AsyncIterator[Any]:
        yield asked

    @asynccontextmanager
    async def answer(self, asked: Any, request: GenerateRequest, log: object) -> AsyncIterator[Mailbox]:
        prompt = str(request.prompt)
        self.patience[prompt] = asked.queue_deadline - time.monotonic()
        if prompt == self._refused:
            raise QueueTimeout("no slot")
        self.open += 1
        self.most = max(self.most, self.open)
        mailbox = Mailbox(100, lambda error: None)
        talking = asyncio.create_task(self._talk(mailbox, prompt))
        try:
            yield mailbox
        finally:
            talking.cancel()
            self.open -= 1

    async def _talk(self, mailbox: Mailbox, prompt: str) -> None:
        mailbox.put(Started(1, 0, 1, 0))
        await asyncio.sleep(STEP_S)
        mailbox.put(Text(1, prompt))
        await asyncio.sleep(STEP_S)
        if prompt == self._failing:
            mailbox.put(Failed(1, Failure(FailureCode.INTERNAL, "broken")))
        else:
            mailbox.put(Finished(1, FinishReason.STOP, Usage(1, 1, 0), TIMINGS))


async def heard(corridor: Corridor, count: int) -> list[str]:
    """What each answer said."""
    requests = [GenerateRequest(prompt=str(number)) for number in range(count)]
    request_log = RequestLog("id", "POST", "/")
    texts = [""] * count
    async with start_answers(cast(Pipeline, corridor), call(patience_s=5.0), requests, request_log) as answer:
        while not answer.ended:
            events = await answer.take()
            texts[answer.choice] += "".join(event.text for event in events if isinstance(event, Text))
    return texts


@pytest.mark.parametrize("count", [1, 2, MAX_AT_ONCE, 3 * MAX_AT_ONCE])
async def test_each_answer_keeps_its_number(count: int) -> None:
    corridor = Corridor()
    assert await heard(corridor, count) == [str(number) for number in range(count)]
    assert corridor.most == min(count, MAX_AT_ONCE)
    assert corridor.open == 0


async def test_tokens_that_nobody_has_read_yet_are_counted() -> None:
    """Whoever reads nothing of several answers, and then leaves, pays for what came."""
    requests = [GenerateRequest(prompt=str(number)) for number in range(2)]
    request_log = RequestLog("id", "POST", "/")
    async with start_answers(cast(Pipeline, Corridor()), call(patience_s=5.0), requests, request_log) as answer:
        await asyncio.sleep(10 * STEP_S)
        assert sum(log.num_generated for log in request_log.answers) > 0
        while not answer.ended:
            await answer.take()
        assert [log.num_generated for log in request_log.answers] == [0, 0]


class Looked(tuple[int | str, ...]):
    """A prompt that notes when it is gone through."""

    turns: list[int]
    loop_turn = 0

    def __iter__(self) -> Iterator[int | str]:
        self.turns.append(Looked.loop_turn)
        return super().__iter__()


async def test_only_the_first_answer_to_a_prompt_goes_through_it_each_prompt_in_a_turn_of_its_own() -> None:
    """All 128 answers did so at once: 287 ms of the loop for four prompts in 340 KB."""
    prompts = [Looked((1, "", number)) for number in range(4)]
    for prompt in prompts:
        prompt.turns = []
    requests = [GenerateRequest(prompt=prompt) for prompt in prompts for _ in range(MAX_AT_ONCE // 4)]

    async def beat() -> None:
        while True:
            Looked.loop_turn += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    async with start_answers(cast(Pipeline, Corridor()), call(patience_s=5.0), requests, RequestLog("id", "POST", "/")):
        beating.cancel()
    turns = [turn for prompt in prompts for turn in prompt.turns]
    assert len(turns) == len(set(turns)) == len(prompts)


async def test_answers_that_wait_for_others_have_no_task_yet() -> None:
    """Those of twenty requests with a hundred prompts were 90,000 objects, which one collection took 60 ms for."""
    before = len(asyncio.all_tasks())
    requests = [GenerateRequest(prompt=str(number)) for number in range(3 * MAX_AT_ONCE)]
    corridor = Corridor()
    async with start_answers(cast(Pipeline, corridor), call(patience_s=5.0), requests, RequestLog("id", "POST", "/")):
        assert len(asyncio.all_tasks()) - before <= MAX_AT_ONCE + corridor.open


async def test_answers_under_way_are_cancelled_one_in_a_turn_of_the_loop() -> None:
    """The callers of twenty requests with a hundred prompts each left: all at once, that kept the loop for 120 ms."""
    corridor, ends = Corridor(), [0]
    requests = [GenerateRequest(prompt=str(number)) for number in range(MAX_AT_ONCE)]

    async def leave() -> None:
        async with start_answers(
            cast(Pipeline, corridor), call(patience_s=5.0), requests, RequestLog("id", "POST", "/")
        ):
            begun.set()
            await asyncio.Event().wait()

    begun = asyncio.Event()
    leaving = asyncio.create_task(leave())
    await begun.wait()
    leaving.cancel()
    before = corridor.open
    assert before > MAX_AT_ONCE // 2
    while not leaving.done():
        await asyncio.sleep(0)
        ends.append(before - corridor.open)
        before = corridor.open
    assert corridor.open == 0
    assert max(ends) <= 2


async def test_later_turns_wait_as_long_for_a_slot_as_the_first() -> None:
    corridor = Corridor()
    await heard(corridor, 3 * MAX_AT_ONCE)
    assert corridor.patience[str(3 * MAX_AT_ONCE - 1)] == pytest.approx(5.0, abs=STEP_S / 2)


@pytest.mark.parametrize("count", [2, MAX_AT_ONCE + 3])
@pytest.mark.parametrize("trouble", ["failing", "refused"])
async def test_one_that_fails_ends_them_all(count: int, trouble: str) -> None:
    corridor = Corridor(**{trouble: count - 1})
    with pytest.raises(PaddockError, match="broken" if trouble == "failing" else "no slot"):
        await heard(corridor, count)
    assert corridor.open == 0, "every slot is given back"


@pytest.mark.parametrize("trouble", ["failing", "refused"])
async def test_those_that_fail_are_gone_at_once(trouble: str) -> None:
    """They left everything that they knew to the collector of cycles: 200,000 objects in half a minute."""
    corridor = Corridor(**{trouble: 2})
    known = weakref.ref(corridor)
    gc.collect()
    gc.disable()
    try:
        hearing = asyncio.create_task(heard(corridor, MAX_AT_ONCE + 3))
        del corridor
        with contextlib.suppress(PaddockError):
            await hearing
        del hearing
        await asyncio.sleep(STEP_S)
        assert known() is None, "errors and frames hold each other"
    finally:
        gc.enable()


def test_a_prompt_counts_once() -> None:
    ends = [Finished(1, FinishReason.STOP, Usage(prompt, 2, 1), TIMINGS) for prompt in (5, 5, 7, 7)]
    assert usage_of(ends, 2) == Usage(12, 8, 2)
    assert usage_of(ends[:2], 1) == Usage(5, 4, 1)
