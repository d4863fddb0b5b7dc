"""A few requests begin in each turn of the loop; callers that are known take turns before any crowd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.support.waiting import until
from workers.http_server import pacer as pacer_module
from workers.http_server.pacer import CONTESTED_S, CROWD_REST_FACTOR, FIRST_MOST, MOST, TURN_S, Pacer


class Asking:
    """A connection with one request."""

    def __init__(self, name: str, begun: list[str], work: Callable[[], None] | None = None) -> None:
        self._name, self._begun, self._work = name, begun, work

    def begin(self) -> None:
        self._begun.append(self._name)
        if self._work is not None:
            asyncio.get_running_loop().call_soon(self._work)


def crowd(pacer: Pacer, begun: list[str], count: int, address: str = "10.0.0.1", caller: str = "") -> list[Asking]:
    """So many requests that wait."""
    there = [Asking(caller or address, begun) for _ in range(count)]
    for one in there:
        pacer.wait(one, caller, address)
    return there


async def over(pacer: Pacer) -> None:
    while pacer.num_waiting:  # noqa: ASYNC110 - each is a turn of the loop
        await asyncio.sleep(0)


def fill_turn(pacer: Pacer) -> int:
    """Let as many begin as may at once; returns how many."""
    count = 0
    while pacer.may_begin():
        count += 1
    return count


async def test_who_is_alone_begins_at_once() -> None:
    pacer = Pacer()
    for _ in range(5):
        assert pacer.may_begin()
        await asyncio.sleep(0)


async def test_so_many_begin_in_a_turn_and_nobody_goes_before_those_who_wait() -> None:
    pacer, begun = Pacer(), list[str]()
    assert fill_turn(pacer) == FIRST_MOST
    crowd(pacer, begun, 5 * FIRST_MOST)
    await asyncio.sleep(0)
    assert 0 < len(begun) <= FIRST_MOST
    assert not pacer.may_begin()
    turns = 1
    while pacer.num_waiting:
        before = len(begun)
        await asyncio.sleep(0)
        turns += 1
        assert len(begun) - before <= FIRST_MOST + turns
    assert turns >= 3
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pacer.may_begin()


async def test_a_known_caller_does_not_stand_behind_the_crowd() -> None:
    pacer, begun = Pacer(), list[str]()
    fill_turn(pacer)
    for number in range(40):
        crowd(pacer, begun, 10, f"10.0.0.{number}")
    crowd(pacer, begun, 1, "10.0.0.1", "a key")
    crowd(pacer, begun, 1, "10.0.0.1", "another")
    await over(pacer)
    assert len(begun) == 402
    assert max(begun.index("a key"), begun.index("another")) <= 3


async def test_known_callers_take_turns_with_each_other_and_with_all_others() -> None:
    pacer, begun = Pacer(), list[str]()
    fill_turn(pacer)
    crowd(pacer, begun, 100, "x", "greedy")
    crowd(pacer, begun, 3, "x", "modest")
    crowd(pacer, begun, 3, "new")
    await over(pacer)
    assert begun.index("modest") < 3
    assert [name for name in begun[:9] if name != "greedy"] == ["modest", "new"] * 3


async def test_addresses_take_turns() -> None:
    pacer, begun = Pacer(), list[str]()
    fill_turn(pacer)
    crowd(pacer, begun, 200, "crowded")
    crowd(pacer, begun, 2, "quiet")
    await over(pacer)
    assert begun[:4] == ["crowded", "quiet"] * 2


async def test_who_leaves_is_not_begun_and_who_waits_waits_once() -> None:
    pacer, begun = Pacer(), list[str]()
    fill_turn(pacer)
    first, second = crowd(pacer, begun, 2)
    pacer.wait(second, "", "elsewhere")
    assert pacer.num_waiting == 2
    pacer.leave(first)
    pacer.leave(first)
    assert not pacer.waits(first)
    await over(pacer)
    assert len(begun) == 1


async def test_one_that_fails_keeps_nobody_from_beginning() -> None:
    class Failing:
        def begin(self) -> None:
            raise RuntimeError("this one")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    pacer, begun = Pacer(), list[str]()
    fill_turn(pacer)
    pacer.wait(Failing(), "", "a")
    crowd(pacer, begun, 3)
    await over(pacer)
    assert len(begun) == 3
    assert len(told) == 1


async def test_as_many_begin_as_take_the_time_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request does in its first step counts, too."""
    now = 0.0
    monkeypatch.setattr(pacer_module, "thread_time", lambda: now)
    pacer, begun, per_turn = Pacer(), list[str](), list[int]()

    async def count(num_waiting: int, took_s: float) -> None:
        def work() -> None:
            nonlocal now
            now += took_s

        fill_turn(pacer)
        for _ in range(num_waiting):
            pacer.wait(Asking("", begun, work), "", "a")
        while pacer.num_waiting:
            before = len(begun)
            await asyncio.sleep(0)
            per_turn.append(len(begun) - before)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    await count(2000, TURN_S / 1000)
    assert per_turn[-2] > 2 * FIRST_MOST
    assert max(per_turn) <= MOST
    per_turn.clear()
    await count(500, TURN_S / 4)
    assert max(per_turn[10:]) <= 5
    per_turn.clear()
    await count(20, 10 * TURN_S)
    assert per_turn[-1] == 1


async def test_a_crowd_leaves_most_of_the_time_to_others_and_known_callers_do_not_wait_for_its_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(pacer_module, "thread_time", lambda: now)
    monkeypatch.setattr(pacer_module, "monotonic", lambda: now)

    def work() -> None:
        nonlocal now
        now += TURN_S / FIRST_MOST

    pacer, begun = Pacer(rests=True), list[str]()
    fill_turn(pacer)
    for _ in range(10 * FIRST_MOST):
        pacer.wait(Asking("crowd", begun, work), "", "a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(begun) <= FIRST_MOST + 1
    crowd(pacer, begun, 3, "a", "a key")
    await asyncio.sleep(0)
    assert begun[-3:] == ["a key"] * 3
    before = len(begun)
    now += 10 * TURN_S
    await asyncio.sleep(10 * TURN_S)
    assert before < len(begun) <= before + FIRST_MOST + 2


@pytest.mark.parametrize("others_ask", [False, True])
async def test_a_known_callers_crowd_pauses_only_while_others_ask(
    monkeypatch: pytest.MonkeyPatch, others_ask: bool
) -> None:
    now = 0.0
    monkeypatch.setattr(pacer_module, "thread_time", lambda: now)
    monkeypatch.setattr(pacer_module, "monotonic", lambda: now)

    def work() -> None:
        nonlocal now
        now += TURN_S / FIRST_MOST

    pacer, begun = Pacer(rests=True), list[str]()
    fill_turn(pacer)
    for _ in range(10 * FIRST_MOST):
        pacer.wait(Asking("crowd", begun, work), "a key", "a")
    if others_ask:
        crowd(pacer, begun, 1, "a", "another")
    for _ in range(5):
        await asyncio.sleep(0)
    before = begun.count("crowd")
    assert before <= FIRST_MOST if others_ask else before > 2 * FIRST_MOST
    if others_ask:
        crowd(pacer, begun, 1, "a", "another")
        await asyncio.sleep(0)
        assert begun[-1] == "another", "who is no crowd does not wait for the pause"
        now += 10 * TURN_S
        await asyncio.sleep(10 * TURN_S)
        assert begun.count("crowd") > before, "it goes on when the pause is over"
        now += CONTESTED_S
    for _ in range(100):
        now += 10 * TURN_S
        await asyncio.sleep(TURN_S / 10)
    assert begun.count("crowd") == 10 * FIRST_MOST


async def test_a_crowd_pauses_longer_where_others_need_the_processor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent_s = 0.0, 0.0
    monkeypatch.setattr(pacer_module, "thread_time", lambda: spent_s)
    monkeypatch.setattr(pacer_module, "monotonic", lambda: now)

    def work() -> None:
        """Take a turn's share of the processor, and nine times as long to get it."""
        nonlocal now, spent_s
        spent_s += TURN_S / FIRST_MOST
        now += 10 * TURN_S / FIRST_MOST

    pacer, begun = Pacer(rests=True), list[str]()
    fill_turn(pacer)
    for _ in range(10 * FIRST_MOST):
        pacer.wait(Asking("crowd", begun, work), "a key", "a")
    crowd(pacer, begun, 1, "a", "another")
    for _ in range(5):
        await asyncio.sleep(0)
    before = begun.count("crowd")
    for _ in range(2):
        now += 3 * CROWD_REST_FACTOR * TURN_S
        await asyncio.sleep(3 * CROWD_REST_FACTOR * TURN_S)
        assert begun.count("crowd") == before
    now += 3 * CROWD_REST_FACTOR * TURN_S
    await until(lambda: begun.count("crowd") > before, 1.0, "the pause is over")


async def test_a_crowd_that_pauses_leaves_callers_without_a_key_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pacer_module, "thread_time", lambda: now)
    monkeypatch.setattr(pacer_module, "monotonic", lambda: now)

    def work() -> None:
        nonlocal now
        now += TURN_S / FIRST_MOST

    pacer, begun = Pacer(rests=True), list[str]()
    fill_turn(pacer)
    crowd(pacer, begun, 1, "a", "another")
    for _ in range(10 * FIRST_MOST):
        pacer.wait(Asking("crowd", begun, work), "a key", "a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun.count("crowd") < 10 * FIRST_MOST
    crowd(pacer, begun, 1, "new")
    await asyncio.sleep(0)
    assert begun[-1] == "new"


@pytest.mark.serial
async def test_beginning_costs_little_where_nobody_waits() -> None:
    pacer = Pacer()
    took_s = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(FIRST_MOST):
            pacer.may_begin()
        took_s.append((time.perf_counter() - began) / FIRST_MOST)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert sorted(took_s)[len(took_s) // 2] < 10e-6  # 0.2 us on a quiet machine
