"""The dispatcher over an upstream that is no worker: what it retries, what it cancels, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from msgspec.structs import replace as replace_struct
from prometheus_client import CollectorRegistry

from gateway.adapters.choice import CallAdapters
from gateway.call import Call
from gateway.dispatch.call_state import Limits
from gateway.dispatch.dispatcher import MAX_ATTEMPTS, MAX_LOST, Dispatcher
from gateway.dispatch.fan_out import start_answers
from gateway.dispatch.pipeline import Pipeline
from gateway.errors import (
    InvalidRequest,
    MemoryFull,
    PaddockError,
    QueueFull,
    RequestTimeout,
    Stopping,
    Unsuited,
    WorkerLost,
)
from gateway.registry.snapshot import FleetSnapshot
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from tests.support.pool import call as call_of
from tests.support.pool import heartbeat
from tests.support.scripted_upstream import PlainAdmission, Script, ScriptedUpstream
from tests.support.still_fleet import StillFleet
from tests.support.waiting import until
from workers.protocol.events import (
    CallEvent,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Started,
    Text,
    Timings,
    Usage,
)
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest

REQUEST = GenerateRequest(prompt="hi")
POOLED = PoolRequest(inputs=("a",))
END = Finished(1, FinishReason.STOP, Usage(7, 3, 2), Timings(0, 1, 1.0, 1, 1.0))
ANSWER: tuple[CallEvent, ...] = (Started(1, 4, 7, 2), Text(1, "hello"), END)
ENDLESS: tuple[CallEvent, ...] = (Started(1, 4, 7, 2), Text(1, "hello"))
VECTORS = PoolResult(pooling="mean", width=1, rows=(1,), num_tokens=(1,), vectors=b"1234")


def failure(code: FailureCode) -> Failure:
    return Failure(code, "no")


LOST, BUSY = failure(FailureCode.WORKER_LOST), failure(FailureCode.BUSY)


class NoScales:
    def scales(self, model: str) -> dict[str, float]:
        return {}


@dataclass
class Scene:
    """A gateway's pipeline with workers w1, w2 ... of model `m`, and others of the model that is their first letter."""

    scripts: dict[str, list[Script]]
    width: int = 0
    """Numbers in a vector, as the workers tell; 0: they don't."""
    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))
    request_log: RequestLog = field(default_factory=lambda: RequestLog("id", "POST", "/"))
    most_bytes: int = 100
    """Bytes of vectors that a request may hold."""
    holds: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        workers = {"m": "w", "x": "x"} | {name[0]: name[0] for name in self.scripts if name[0] != "w"}
        beats = {
            model: tuple(
                replace_struct(heartbeat(name, model=model, boot=f"boot-{name}"), width=self.width)
                for name in self.scripts
                if name[0] == first
            )
            for model, first in workers.items()
        }
        fleet = StillFleet(FleetSnapshot(beats, frozenset(beats)))
        self.upstream, self.admission = ScriptedUpstream(self.scripts), PlainAdmission(fleet)
        limits, adapters = Limits(10.0, 10.0, 600.0), CallAdapters(fleet, NoScales())
        self.dispatcher = Dispatcher(fleet, self.admission, self.upstream, self.metrics, limits, adapters)
        self.pipeline = Pipeline(self.dispatcher, adapters, limits)

    async def answered(
        self, call: Call | None = None, requests: Sequence[GenerateRequest] = (REQUEST,)
    ) -> list[CallEvent]:
        events: list[CallEvent] = []
        async with start_answers(self.pipeline, call or call_of(), requests, self.request_log) as answer:
            while not answer.ended:
                events += await answer.take()
        return events

    async def pooled(self) -> PoolResult:
        return await self.pipeline.pool(call_of(), POOLED, self.request_log.answer, self._hold)

    def _hold(self, num_bytes: int, width: int) -> None:
        self.holds.append((num_bytes, width))
        if num_bytes > self.most_bytes:
            raise MemoryFull("no more")

    def check_all_is_given_back(self) -> None:
        assert self.admission.num_held == self.pipeline.num_calls == 0
        values = self.metrics.registry.get_sample_value
        in_flight = [values("paddock_requests_in_flight", {"model": model}) for model in "mx"]
        assert not any(in_flight)


async def test_an_answer_comes_as_the_upstream_gives_it_and_is_charged() -> None:
    scene = Scene({"w1": [ANSWER]})
    assert tuple(await scene.answered()) == ANSWER
    (attempt,) = scene.request_log.answer.attempts
    assert (attempt.at.worker, attempt.slot) == ("w1", 4)
    assert scene.admission.leases[0].charged == [8.0], "the uncached prompt and the answer"
    assert scene.upstream.cancelled == []
    scene.check_all_is_given_back()


@pytest.mark.parametrize(
    ("script", "num_written", "charged"),
    [
        ((), 0, None),
        ((Started(1, 4, 30, 2),), 0, None),
        ((Started(1, 4, 700, 2),), 0, 698.0),
        ((Started(1, 4, 30, 2), Text(1, "a")), 12, None),
        ((Started(1, 4, 30, 2), Text(1, "a")), 590, 618.0),
    ],
    ids=["nothing came", "less than predicted", "a long prompt", "a short answer", "a long answer"],
)
async def test_a_call_that_is_left_is_charged_for_what_came_and_at_least_as_predicted(
    script: Script, num_written: int, charged: float | None
) -> None:
    """40 tokens were predicted: a caller that always left at token 590 of 600 got sixteen times as much as it paid."""
    scene = Scene({"w1": [script]})
    scene.request_log.answer.num_written = lambda: num_written
    leaving = asyncio.create_task(scene.answered())
    await until(lambda: scene.upstream.started == ["w1"], 1.0, "it is asked")
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert scene.admission.leases[0].charged == [charged]
    scene.check_all_is_given_back()


async def test_a_call_that_fails_is_charged_for_what_came() -> None:
    scene = Scene({"w1": [(Started(1, 4, 700, 2), Text(1, "a"), Failed(1, LOST))]})
    assert (await scene.answered())[-1] == Failed(1, LOST)
    assert scene.admission.leases[0].charged == [698.0]


@pytest.mark.parametrize("code", sorted(set(FailureCode) - {FailureCode.STORAGE_FULL, FailureCode.OVERRUN}))
@pytest.mark.parametrize("is_event", [False, True])
async def test_an_attempt_that_was_refused_is_charged_for_nothing(code: FailureCode, is_event: bool) -> None:
    """Each cost what was predicted: a worker that drained doubled what all callers paid."""
    refused: Script = (Failed(1, failure(code)),) if is_event else failure(code)
    scene = Scene({"w1": [refused], "w2": [ANSWER]})
    with suppress(PaddockError):
        await scene.answered()
    as_predicted = [None] if is_event else []
    may_have_worked = code in (FailureCode.WORKER_LOST, FailureCode.INTERNAL)
    assert scene.admission.leases[0].charged == (as_predicted if may_have_worked else [0.0])
    pooled = Scene({"w1": [failure(code)], "w2": [VECTORS]})
    with suppress(PaddockError):
        await pooled.pooled()
    assert pooled.admission.leases[0].charged == ([] if may_have_worked else [0.0])


async def test_a_call_that_was_begun_and_given_back_is_charged_for_what_came() -> None:
    refused = failure(FailureCode.OUT_OF_MEMORY)
    scene = Scene({"w1": [(Started(1, 0, 700, 2), Text(1, "a"), Failed(1, refused))]})
    assert (await scene.answered())[-1] == Failed(1, refused)
    assert scene.admission.leases[0].charged == [698.0]


async def test_pooled_work_is_charged_by_its_tokens() -> None:
    scene = Scene({"w1": [replace_struct(VECTORS, num_tokens=(70,))]})
    await scene.pooled()
    assert scene.admission.leases[0].charged == [70.0]
    scene.check_all_is_given_back()


async def test_vectors_that_would_take_too_much_are_refused_before_they_are_computed() -> None:
    """They were computed, came, and were refused then: 14 of 16 requests, and 480 MiB that nothing counted."""
    scene = Scene({"w1": [VECTORS]}, width=26)
    with pytest.raises(MemoryFull):
        await scene.pooled()
    assert scene.holds == [(104, 26)]
    assert scene.upstream.started == []
    assert scene.admission.leases[0].charged == [0.0], "no work was done"
    scene.check_all_is_given_back()


async def test_vectors_are_counted_as_they_come() -> None:
    """A worker need not tell how wide they are, and with pooling `none` each token has one."""
    scene = Scene({"w1": [VECTORS]}, most_bytes=3)
    with pytest.raises(MemoryFull):
        await scene.pooled()
    assert scene.holds == [(0, 0), (4, 0)]
    scene.check_all_is_given_back()


@pytest.mark.parametrize("code", [FailureCode.WORKER_LOST, FailureCode.BUSY, FailureCode.DRAINING])
@pytest.mark.parametrize("is_event", [False, True])
async def test_what_fails_before_it_has_begun_is_tried_on_another_worker(code: FailureCode, is_event: bool) -> None:
    refused: Script = (Started(1, 0, 7, 2), Failed(1, failure(code))) if is_event else failure(code)
    scene = Scene({"w1": [refused], "w2": [ANSWER]})
    assert tuple(await scene.answered()) == ANSWER
    assert scene.upstream.started == ["w1", "w2"]
    assert scene.upstream.cancelled == [], "there is nothing left of a call that has failed"
    assert len(scene.request_log.answer.attempts) == 2
    scene.check_all_is_given_back()


async def test_what_fails_after_it_has_begun_is_told_in_its_stream() -> None:
    scene = Scene({"w1": [(Started(1, 0, 7, 2), Text(1, "hel"), Failed(1, LOST))], "w2": [ANSWER]})
    assert (await scene.answered())[-1] == Failed(1, LOST)
    assert scene.upstream.started == ["w1"]
    scene.check_all_is_given_back()


async def test_what_no_worker_would_take_is_not_tried_again() -> None:
    scene = Scene({"w1": [failure(FailureCode.INVALID_REQUEST)], "w2": [ANSWER]})
    with pytest.raises(InvalidRequest):
        await scene.answered()
    assert scene.upstream.started == ["w1"]
    scene.check_all_is_given_back()


@pytest.mark.parametrize(("refusal", "most", "error"), [(LOST, MAX_LOST, WorkerLost), (BUSY, MAX_ATTEMPTS, QueueFull)])
async def test_attempts_are_bounded(refusal: Failure, most: int, error: type[PaddockError]) -> None:
    scene = Scene({f"w{number}": [refusal] for number in range(9)})
    with pytest.raises(error):
        await scene.answered()
    assert len(scene.upstream.started) == most
    scene.check_all_is_given_back()


async def test_leaving_cancels_and_gives_the_slot_back() -> None:
    scene = Scene({"w1": [ENDLESS]})
    async with scene.pipeline.answer(call_of(), REQUEST, scene.request_log.answer) as answer:
        assert await answer.take() == list(ENDLESS)
        assert (scene.admission.num_held, scene.pipeline.num_calls) == (1, 1)
    assert scene.upstream.cancelled == ["w1"]
    scene.check_all_is_given_back()


@pytest.mark.parametrize("script", [(), (Started(1, 4, 7, 2),), ENDLESS])
async def test_a_task_that_is_cancelled_leaves_nothing_behind(script: Script) -> None:
    scene = Scene({"w1": [script]})
    task = asyncio.create_task(scene.answered())
    await until(lambda: scene.upstream.started == ["w1"], 1.0, "it is asked")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.upstream.cancelled == ["w1"]
    scene.check_all_is_given_back()


async def test_a_gateway_that_stops_cuts_its_calls_off() -> None:
    scene = Scene({"w1": [ENDLESS]})
    task = asyncio.create_task(scene.answered())
    await until(lambda: scene.pipeline.num_calls == 1 and scene.upstream.started == ["w1"], 1.0, "it is asked")
    await asyncio.sleep(0)
    scene.pipeline.cut_all()
    with pytest.raises(Stopping):
        await task
    assert scene.upstream.cancelled == ["w1"]
    scene.check_all_is_given_back()


async def test_a_call_whose_time_is_up_is_cancelled() -> None:
    scene = Scene({"w1": [()]})
    late = replace(call_of(), deadline=call_of().received_at + 0.05)
    with pytest.raises(RequestTimeout):
        await scene.answered(late)
    assert scene.upstream.cancelled == ["w1"]
    scene.check_all_is_given_back()


async def test_several_answers_are_placed_each_by_itself() -> None:
    scene = Scene({"w1": [LOST, ANSWER, ANSWER], "w2": [ANSWER]})
    events = await scene.answered(requests=[REQUEST] * 3)
    assert events.count(END) == 3
    assert sorted(scene.upstream.started) == ["w1", "w1", "w1", "w2"]
    scene.check_all_is_given_back()


async def test_a_fallback_takes_what_its_model_can_not() -> None:
    scene = Scene({"x1": [ANSWER]})
    call = replace(call_of(), fallbacks=("x",))
    assert tuple(await scene.answered(call)) == ANSWER
    assert scene.request_log.model == "x"
    scene.check_all_is_given_back()


async def test_what_does_not_suit_a_fallback_is_no_fault_of_the_request() -> None:
    scene = Scene({"x1": [failure(FailureCode.UNSUPPORTED)]})
    with pytest.raises(Unsuited):
        await scene.answered(replace(call_of(), fallbacks=("x",)))
    scene.check_all_is_given_back()


async def test_a_chain_of_models_that_do_not_suit_is_not_tried_without_end() -> None:
    chain = ("x", "y", "z", "u", "v")
    scene = Scene({f"{model}1": [failure(FailureCode.UNSUPPORTED)] for model in chain})
    with pytest.raises(Unsuited):
        await scene.answered(replace(call_of(), fallbacks=chain))
    assert len(scene.upstream.started) == MAX_ATTEMPTS
    scene.check_all_is_given_back()


async def test_pooled_work_goes_through_the_same_loop() -> None:
    scene = Scene({"w1": [LOST], "w2": [VECTORS]})
    assert await scene.pooled() == VECTORS
    assert scene.upstream.started == ["w1", "w2"]
    assert scene.upstream.asked == [POOLED, POOLED]
    scene.check_all_is_given_back()


async def test_pooled_work_that_nobody_takes_fails() -> None:
    scene = Scene({f"w{number}": [BUSY] for number in range(9)})
    with pytest.raises(QueueFull):
        await scene.pooled()
    assert len(scene.upstream.started) == MAX_ATTEMPTS
    scene.check_all_is_given_back()


async def test_a_worker_that_is_lost_is_not_asked() -> None:
    scene = Scene({"w1": [ANSWER], "w2": [ANSWER]})
    scene.upstream.lost.add("boot-w1")
    await scene.answered()
    assert scene.upstream.started == ["w2"]
