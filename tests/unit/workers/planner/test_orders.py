"""Orders are kept until a report shows that they were heard."""

from __future__ import annotations

import pytest

from tests.unit.workers.planner.reports import GIB, NOW, report, told
from workers.planner.merge import worker_of
from workers.planner.messages import decode_orders, encode
from workers.planner.orders import Orders
from workers.protocol.residency import Why
from workers.residency.picture import CPU, Share
from workers.residency.plan import Drain, Release, Reserve, Start, Stop

SHARES = (Share(CPU, GIB),)
START = Start("m", "host", SHARES, Why.of("1 call waits"), "host/7.1")
FENCE = 7


@pytest.fixture
def orders() -> Orders:
    return Orders("boot")


def test_a_start_is_told_until_it_was_dealt_with_and_counts_as_loading(orders: Orders) -> None:
    orders.add(START, 3, "host/7.3", NOW)
    for _ in range(2):  # the first message may be lost
        (start,) = orders.message(NOW, FENCE, "planner", {}).starts
        assert (start.number, start.worker, start.shares, start.replaces) == (3, "host/7.3", SHARES, "host/7.1")
        orders.settle(report(NOW, fence=FENCE, done=2), FENCE)
    (loading,) = orders.overlay((), "host")
    assert (loading.id, loading.status, loading.shares, loading.since) == ("host/7.3", "loading", SHARES, NOW)
    assert loading.replaces == "host/7.1"
    orders.settle(report(NOW, fence=FENCE - 1, done=99), FENCE)
    assert orders.starts, "the machine has dealt with another planner's orders"
    orders.settle(report(NOW, fence=FENCE, done=3), FENCE)
    assert orders.is_empty


def test_who_leaves_to_sleep_is_told_with_who_leaves(orders: Orders) -> None:
    orders.add(Stop("w", "m", SHARES, Why.of("idle"), sleeps=True), 1, "", NOW)
    told_now = decode_orders(encode(orders.message(NOW, FENCE, "planner", {}, ["other"])))
    assert (told_now.sleeping, [*told_now.leaving], told_now.forgotten) == (("w",), ["w"], ("other",))
    orders.add(Drain("w", "m", Why.of("an admin has unloaded it")), 2, "", NOW)
    assert orders.message(NOW, FENCE, "planner", {}).sleeping == ()
    orders.add(Stop("w", "m", SHARES, Why.of("idle"), sleeps=True), 3, "", NOW)
    orders.settle(report(NOW, told("w", "m", status="draining"), fence=FENCE), FENCE)
    assert orders.is_empty
    assert orders.message(NOW, FENCE, "planner", {}).sleeping == ()


@pytest.mark.parametrize("action", [Stop("w", "m", SHARES, Why.of("idle")), Drain("w", "m", Why.of("idle"))])
def test_one_that_leaves_counts_as_leaving_until_its_machine_says_so(orders: Orders, action: Stop | Drain) -> None:
    orders.add(action, 1, "", NOW)
    ready = told("w", "m")
    orders.settle(report(NOW, ready, fence=FENCE), FENCE)
    assert orders.message(NOW, FENCE, "planner", {}).leaving == {"w": Why.of("idle")}
    assert [worker.status for worker in orders.overlay([worker_of(ready, "host", 0.0)], "host")] == ["draining"]
    orders.settle(report(NOW, told("w", "m", status="draining"), fence=FENCE), FENCE)
    assert orders.is_empty


def test_one_is_reserved_and_released(orders: Orders) -> None:
    ready, reserved = told("w", "m"), told("w", "m", status="reserved")
    orders.add(Reserve("w", "m", "other", Why.of("it waits")), 1, "", NOW)
    orders.settle(report(NOW, ready), FENCE)
    (worker,) = orders.overlay([worker_of(ready, "host", 0.0)], "host")
    assert worker.status == "reserved"
    assert worker.is_busy, "a call may be on its way to it"
    orders.settle(report(NOW, reserved), FENCE)
    assert orders.is_empty
    orders.add(Release("w", "m", Why.of("nobody waits")), 2, "", NOW)
    assert orders.message(NOW, FENCE, "planner", {}).released == {"w": Why.of("nobody waits")}
    orders.settle(report(NOW, ready), FENCE)
    assert orders.is_empty


def test_a_supervisor_that_was_started_anew_has_none_of_them(orders: Orders) -> None:
    orders.add(START, 1, "host/7.1", NOW)
    orders.add(Stop("w", "m", SHARES, Why.of("idle")), 2, "", NOW)
    orders.settle(report(NOW, boot="another", fence=FENCE), FENCE)
    assert orders.is_empty
    assert orders.message(NOW, FENCE, "planner", {}).boot == "another"


def test_what_is_told_can_be_read(orders: Orders) -> None:
    orders.add(START, 1, "host/7.1", NOW)
    message = orders.message(NOW, FENCE, "planner", {})
    assert decode_orders(encode(message)) == message
