from __future__ import annotations

import asyncio

from workers.protocol.events import CallEvent, Text
from workers.service.calls.stream import Mailbox


async def test_steps_arrive_in_order_and_none_is_lost_however_fast_they_come() -> None:
    mailbox = Mailbox(asyncio.get_running_loop(), print)
    got: list[tuple[int, list[CallEvent]]] = []
    mailbox.open(lambda step, events: got.append((step, events)))

    def engine() -> None:
        for step in range(1, 5001):
            mailbox.put(step, [Text(step, "x")])

    await asyncio.to_thread(engine)
    mailbox.flush()
    assert [event.call for _, events in got for event in events] == list(range(1, 5001))
    assert [step for step, _ in got] == [events[-1].call for _, events in got], "a merged frame has its last step's id"


async def test_what_comes_while_the_loop_is_busy_is_one_delivery() -> None:
    mailbox = Mailbox(asyncio.get_running_loop(), print)
    got: list[tuple[int, list[CallEvent]]] = []
    mailbox.open(lambda step, events: got.append((step, events)))
    first: list[CallEvent] = [Text(1, "a")]
    mailbox.put(1, first)
    mailbox.put(2, [Text(1, "b")])
    await asyncio.sleep(0.01)
    assert got == [(2, [Text(1, "a"), Text(1, "b")])]
    assert first == [Text(1, "a")], "the engine's own list is left alone"
    mailbox.flush()
    assert len(got) == 1


def test_after_the_loop_has_closed_steps_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop, print)
    mailbox.open(lambda step, events: None)
    loop.close()
    mailbox.put(1, [])
    mailbox.put(2, [])


async def test_what_comes_before_it_is_open_is_delivered_then_and_a_step_that_is_lost_is_told() -> None:
    failures: list[BaseException] = []
    mailbox = Mailbox(asyncio.get_running_loop(), failures.append)
    mailbox.put(1, [Text(1, "a")])
    await asyncio.sleep(0.01)
    lost = ValueError("nobody knows this call")

    def deliver(step: int, events: list[CallEvent]) -> None:
        raise lost

    mailbox.open(deliver)
    assert failures == [lost]
