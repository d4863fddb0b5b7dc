"""What becomes of a call before it is placed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from gateway.adapters.choice import CallAdapters
from gateway.call import Call
from gateway.dispatch.call_state import CallState, Limits
from gateway.dispatch.request_size import INLINE_CHARS, num_chars
from gateway.dispatch.slot_search import INLINE_HELD_BYTES, INLINE_TOKENS, SlotSearch
from gateway.dispatch.suitable_workers import RECORD_WAIT_S, SuitableWorkers
from gateway.errors import NotSupported
from gateway.registry.snapshot import FleetSnapshot
from gateway.routing.placement import PlacementRequest, placement_request_of, placement_request_of_pooled
from gateway.routing.retries import RetryBudget
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.metrics import Metrics
from tests.support.pool import call, heartbeat
from workers.protocol.heartbeat import WorkerKind
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import AdapterUse, GenerateRequest


class WatchedFleet:
    """A fleet without workers, which notes the threads that look at it."""

    def __init__(self) -> None:
        self.looked_from: list[int] = []
        self.now = FleetSnapshot()

    @property
    def snapshot(self) -> FleetSnapshot:
        self.looked_from.append(threading.get_ident())
        return self.now

    def listen(self, on_change: Callable[[FleetSnapshot], None]) -> None:
        """Nothing changes."""


class NoScales:
    def scales(self, model: str) -> dict[str, float]:
        return {}


def search_in(fleet: WatchedFleet) -> SlotSearch:
    nobody = cast(Any, None)
    return SlotSearch(fleet, nobody, nobody, CallAdapters(fleet, NoScales()))


def state_of(request: GenerateRequest | PoolRequest, held_bytes: int = 0) -> CallState:
    made = dataclasses.replace(call(), held_bytes=held_bytes)
    return CallState(made, AnswerLog(), request, Metrics(CollectorRegistry()), Limits(1.0, 1.0, 1.0), RetryBudget(0.1))


async def test_the_heads_of_a_long_prompt_are_hashed_on_a_thread() -> None:
    """A prompt of 8 MiB kept the event loop, and every stream with it, for 10 to 26 ms."""
    for number, is_aside in ((INLINE_CHARS, False), (INLINE_CHARS + 1, True)):
        fleet, request = WatchedFleet(), GenerateRequest(prompt="x" * number)
        state = state_of(request)
        await search_in(fleet).prepare(state)
        assert (fleet.looked_from[0] != threading.get_ident()) == is_aside
        assert state.placement_request == placement_request_of(request, call().principal.team, {})


async def test_the_heads_of_many_messages_or_large_tools_are_hashed_on_a_thread() -> None:
    """Ten thousand short messages kept the event loop for 60 ms, a schema of 8 MiB for 27 ms."""
    for held_bytes, is_aside in ((INLINE_HELD_BYTES, False), (INLINE_HELD_BYTES + 1, True)):
        fleet = WatchedFleet()
        await search_in(fleet).prepare(state_of(GenerateRequest(prompt="x"), held_bytes))
        assert (fleet.looked_from[0] != threading.get_ident()) == is_aside


async def test_one_that_leaves_while_its_prompt_is_hashed_holds_nobody_up() -> None:
    search, request = search_in(WatchedFleet()), GenerateRequest(prompt="x" * (4 * INLINE_CHARS))
    preparing = [asyncio.create_task(search.prepare(state_of(request))) for _ in range(4)]
    preparing[1].cancel()
    done = await asyncio.gather(*preparing, return_exceptions=True)
    assert [isinstance(one, BaseException) for one in done] == [False, True, False, False]


async def test_the_tokens_of_much_pooled_work_are_counted_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million in seventeen inputs kept the event loop for 25 ms, and were gone through once more to be sent."""
    counted_on = list[int]()

    def counted(asked: PoolRequest) -> PlacementRequest:
        counted_on.append(threading.get_ident())
        return placement_request_of_pooled(asked)

    monkeypatch.setattr("gateway.dispatch.slot_search.placement_request_of_pooled", counted)
    for number, is_aside in ((INLINE_TOKENS, False), (INLINE_TOKENS + 1, True)):
        asked = PoolRequest(inputs=("text", tuple(range(number))))
        state = state_of(asked)
        await search_in(WatchedFleet()).prepare(state)
        assert (counted_on.pop() != threading.get_ident()) == is_aside
        assert state.placement_request == placement_request_of_pooled(asked)


def test_counting_what_is_sent_stops_where_it_is_long() -> None:
    long = PoolRequest(inputs=(tuple(range(32_768)),) * 32)
    assert INLINE_CHARS < num_chars(long) <= 2 * INLINE_CHARS


class RankedWorker(Exception):
    """A call has come to its place in the line."""


class Admission:
    """Notes what the calls ask for, and places none."""

    def __init__(self) -> None:
        self.asks = list[PlacementRequest]()

    def predicted_wait_s(self, model: str) -> float:
        return 0.0

    def may_load(self, model: str) -> bool:
        return False

    def want(self, model: str) -> None:
        """Nothing loads models here."""

    def slot(self, call: Call, avoid: frozenset[str], placement_request: PlacementRequest, *more: object) -> Any:
        self.asks.append(placement_request)
        raise RankedWorker


@dataclasses.dataclass
class Connections:
    any_lost = False

    def is_lost(self, boot: str) -> bool:
        return False


class ScalesOfOne:
    """A fallback has an adapter that calls use which name none."""

    def scales(self, model: str) -> dict[str, float]:
        return {"x": 1.0} if model == "b" else {}


@pytest.mark.parametrize(("held_bytes", "is_aside"), [(INLINE_HELD_BYTES, False), (INLINE_HELD_BYTES + 1, True)])
async def test_a_fallback_with_adapters_has_long_prompts_hashed_on_a_thread(held_bytes: int, is_aside: bool) -> None:
    """Thirty-two answers to ten thousand messages, which fall back at the same time, kept the event loop for 0.7 s."""
    hashes = {"x": "0" * 64}
    fleet, admission = WatchedFleet(), Admission()
    fleet.now = dataclasses.replace(fleet.now, contents={"b": hashes})
    workers = SuitableWorkers(fleet, cast(Any, Connections()), Metrics(CollectorRegistry()))
    search = SlotSearch(fleet, admission, workers, CallAdapters(fleet, ScalesOfOne()))
    state = state_of(GenerateRequest(prompt="x" * 4096), held_bytes)
    state.call = dataclasses.replace(call("a"), fallbacks=("b",), held_bytes=held_bytes)
    await search.prepare(state)
    beat = replace(heartbeat("w", model="b"), adapters=("x",))
    fleet.now = dataclasses.replace(fleet.now, workers={"b": (beat,)})
    fleet.looked_from.clear()
    async with AsyncExitStack() as held:
        with pytest.raises(RankedWorker):
            await search.wait_for_slot(state, held)
    uses = (AdapterUse("x", 1.0),)
    expected = placement_request_of(replace(state.request, adapters=uses), state.call.principal.team, hashes)
    assert admission.asks == [expected]
    assert any(thread != threading.get_ident() for thread in fleet.looked_from) == is_aside


@pytest.mark.parametrize(("kind", "is_refused"), [("generate", False), ("embed", True)])
async def test_a_slot_that_comes_before_its_workers_record_is_checked(kind: WorkerKind, is_refused: bool) -> None:
    """The call was sent, and the worker refused what it does not do in words of its own."""
    fleet = WatchedFleet()
    workers = SuitableWorkers(fleet, cast(Any, Connections()), Metrics(CollectorRegistry()))
    state, beat = state_of(GenerateRequest(prompt="x")), replace(heartbeat("w"), kind=kind)
    state.call = dataclasses.replace(state.call, kind="generate")
    checking = asyncio.create_task(workers.check(state, beat.at))
    await asyncio.sleep(0)
    assert not checking.done()
    fleet.now = dataclasses.replace(fleet.now, workers={beat.model: (beat,)})
    with pytest.raises(NotSupported) if is_refused else nullcontext():
        await checking


async def test_a_worker_that_is_lost_before_its_record_comes_is_not_waited_for() -> None:
    lost = cast(Any, SimpleNamespace(any_lost=True, is_lost=lambda boot: True))
    workers = SuitableWorkers(WatchedFleet(), lost, Metrics(CollectorRegistry()))
    async with asyncio.timeout(RECORD_WAIT_S / 2):
        await workers.check(state_of(GenerateRequest(prompt="x")), heartbeat("w").at)
