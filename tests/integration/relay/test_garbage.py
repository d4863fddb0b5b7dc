"""A worker that proves the secret and then sends garbage: its calls end, nobody else's, and the gateway is idle."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Iterator

import psutil
import pytest

from gateway.api.intake.disconnect import beside
from gateway.call import Pushed
from gateway.relay.mailbox import Mailbox
from gateway.relay.relay import Relay
from tests.integration.relay.scripted import CALL, ScriptedWorker, scripted_worker
from tests.integration.relay.test_relay import REQUEST
from tests.support.waiting import until
from workers.protocol.events import (
    CallEvent,
    CallFailed,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Started,
    Text,
    Timings,
    Usage,
    encode_step,
)
from workers.protocol.framing import ALIVE_EVENT, MAX_FRAME_BYTES, encode_frame, event_id

MIB = 1 << 20
MANY_FRAMES = 256
END = Finished(1, FinishReason.STOP, Usage(1, 1, 0), Timings(0, 1, 1.0, 1, 1.0))

GARBAGE = {
    "no text in an id": b"id: \xff\xfe-1\ndata: []\n\n",
    "no text in an event": b"event: \xff\ndata: []\n\n",
    "no text in the data": b'id: boot1-1\ndata: [["t",1,"\xff"]]\n\n',
    "no JSON": b"id: boot1-1\ndata: {\n\n",
    "no list": b"id: boot1-1\ndata: 7\n\n",
    "no event": b'id: boot1-1\ndata: [["?",1]]\n\n',
    "another type": b'id: boot1-1\ndata: [["t","one","text",1]]\n\n',
    "nested deep": b"id: boot1-1\ndata: " + b"[" * 200_000 + b"\n\n",
    "nobody alive": b"event: alive\ndata: {}\n\n",
    "no end": b"id: boot1-1\ndata: " + b"x" * (MAX_FRAME_BYTES + 1),
}


CROWDS = {
    "events": (b'["p",1,[1,"",0],[]]', b""),
    "alternatives of one token": (b'[1,"",0]', b'["p",1,[1,"",0],['),
    "calls": (b"1", b""),
}
"""What fills a frame, and what stands before it."""


def frame_full_of(crowd: str) -> bytes:
    item, before = CROWDS[crowd]
    filling = b",".join([item] * (15 * MIB // (len(item) + 1)))
    data = b"[" + before + filling + (b"]]]" if before else b"]")
    return encode_frame(data, event_id("boot1", 1), ALIVE_EVENT if crowd == "calls" else "")


def valid(step: int) -> bytes:
    return encode_frame(encode_step([Text(99, "for nobody")]), event_id("boot1", step))


async def lost(mailbox: Mailbox) -> bool:
    """Whether the call ends, as its worker's fault."""
    async with asyncio.timeout(10):
        while True:
            last = (await mailbox.take())[-1]
            if isinstance(last, Failed):
                return last.failure.code is FailureCode.WORKER_LOST


async def is_unharmed(relay: Relay, worker: ScriptedWorker) -> None:
    """A call at another worker is answered."""
    async with relay.start(worker.at, CALL, REQUEST) as mailbox:
        number = (await worker.submitted(1))[-1]
        worker.submits.clear()
        started, end = Started(number, 0, 1, 0), Finished(number, END.reason, END.usage, END.timings)
        await worker.say([started, Text(number, "hello")], [end])
        events: list[CallEvent] = []
        async with asyncio.timeout(5):
            while not events or not isinstance(events[-1], Finished):
                events += await mailbox.take()
        assert [event.text for event in events if isinstance(event, Text)] == ["hello"]


async def is_idle() -> bool:
    """Nothing spins on the event loop."""
    used, begun = time.process_time(), time.monotonic()
    await asyncio.sleep(0.5)
    return time.process_time() - used < 0.5 * (time.monotonic() - begun)


@pytest.mark.parametrize("before", [0, 3 * MANY_FRAMES], ids=["at once", "behind a backlog"])
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_ends_the_calls_of_its_worker_alone(garbage: bytes, before: int) -> None:
    async with scripted_worker() as ill, scripted_worker(boot="boot2") as well:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([ill.heartbeat(), well.heartbeat()])
            await ill.connected()
            await well.connected()
            async with relay.start(ill.at, CALL, REQUEST) as mailbox:
                await ill.submitted(1)
                await ill.write(b"".join(map(valid, range(1, before + 1))) + garbage)
                assert await lost(mailbox)
            ill.drop()
            await is_unharmed(relay, well)
            assert await is_idle()


async def test_what_could_not_be_read_is_not_asked_for_again() -> None:
    """The worker keeps what it said, and would say it to each connection anew."""
    async with scripted_worker() as ill:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([ill.heartbeat()])
            await ill.connected()
            async with relay.start(ill.at, CALL, REQUEST) as mailbox:
                await ill.submitted(1)
                ill.submits.clear()
                await ill.write(encode_frame(b"{", event_id("boot1", 7)))
                assert await lost(mailbox)
            await ill.connected(2)
            assert ill.resumed_from[-1] == event_id("boot1", 7)
            await until(lambda: not relay.is_lost(ill.boot), 3.0, "the gateway hears that it is back")
            await is_unharmed(relay, ill)


class Ticks:
    """The longest time, of this thread's own, in which nothing else on the event loop had a turn."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.thread_time()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s


@pytest.mark.serial
@pytest.mark.parametrize("crowd", CROWDS)
async def test_a_frame_of_more_than_its_calls_can_say_costs_others_nothing(crowd: str) -> None:
    frame = frame_full_of(crowd)
    async with scripted_worker() as ill:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([ill.heartbeat()])
            await ill.connected()
            async with relay.start(ill.at, CALL, REQUEST) as mailbox:
                await ill.submitted(1)
                ticks = Ticks()
                async with beside(ticks.run()):
                    await ill.write(frame)
                    assert await lost(mailbox)
            assert ticks.longest_s < 0.25


@pytest.mark.serial
async def test_a_step_of_many_answers_is_written_in_turns() -> None:
    """Requests, pings and probes of others get theirs in between."""
    async with scripted_worker() as worker, contextlib.AsyncExitStack() as calls:
        relay = Relay("gw", "secret", 600)
        await calls.enter_async_context(beside(relay.run()))
        await asyncio.sleep(0)
        relay.follow([worker.heartbeat()])
        await worker.connected()
        written: list[int] = []

        def push(events: list[CallEvent]) -> Pushed:
            until = time.thread_time() + 0.0001
            while time.thread_time() < until:
                pass
            written.extend(event.call for event in events)
            return Pushed.WRITTEN

        for number in range(256):
            mailbox = await calls.enter_async_context(relay.start(worker.at, CALL, REQUEST))
            calls.enter_context(beside_now(mailbox.take(push)))
            await worker.submitted(number - 50)  # more connections at once than this would wait to be accepted
        numbers = await worker.submitted(256)
        ticks = Ticks()
        async with beside(ticks.run()):
            await worker.say([Text(number, "a") for number in numbers], [Text(number, "b") for number in numbers])
            await until(lambda: len(written) == 512, 3.0, "all are written")
        assert written == [*numbers, *numbers], "in order, step by step"
        assert ticks.longest_s < 0.01, "51 ms in one turn"


@contextlib.contextmanager
def beside_now(work: Coroutine[None, None, object]) -> Iterator[None]:
    """Runs the coroutine while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


async def test_a_long_prompt_that_is_told_is_one_frame() -> None:
    """However many brackets, commas and quotes its text has."""
    async with scripted_worker() as worker:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([worker.heartbeat()])
            await worker.connected()
            async with relay.start(worker.at, CALL, REQUEST) as mailbox:
                number = (await worker.submitted(1))[0]
                text = '[1,"\\",{"a":2}],' * 400_000
                await worker.say([Started(number, 0, 1, 0), Text(number, text)])
                told: list[CallEvent] = []
                async with asyncio.timeout(10):
                    while len(told) < 2:
                        told += await mailbox.take()
                assert told[1] == Text(number, text)


@pytest.mark.serial
async def test_one_worker_that_never_stops_telling_leaves_half_of_the_time_to_others() -> None:
    flood = encode_frame(b"[" + b",".join([b'["t",99,""]'] * 20_000) + b"]", event_id("boot1", 1))
    async with scripted_worker() as ill:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([ill.heartbeat()])
            await ill.connected()
            with ill.flooding(flood):
                await asyncio.sleep(0.1)
                used, begun = time.thread_time(), time.monotonic()
                await asyncio.sleep(1.0)
                share = (time.thread_time() - used) / (time.monotonic() - begun)
            assert 0.1 < share < 0.65, "half; all of it without the pauses"


def mutated(seed: int) -> Iterator[bytes]:
    """Valid frames with some bytes changed, left out or doubled."""
    chance = random.Random(seed)
    frames = [encode_frame(encode_step([Started(1, 0, 1, 0), Text(1, "a b"), END]), event_id("boot1", 7))]
    frames.append(encode_frame(b"[1,2]", event_id("boot1", 8), ALIVE_EVENT))
    while True:
        data = bytearray(chance.choice(frames))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at]
                case _:
                    data[at:at] = data[at : at + chance.randrange(1, 9)]
        yield bytes(data)


async def test_mutated_frames_neither_end_the_gateway_nor_fill_its_memory() -> None:
    process = psutil.Process()
    async with scripted_worker() as ill, scripted_worker(boot="boot2") as well:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([ill.heartbeat(), well.heartbeat()])
            await well.connected()
            quiet, frames = process.memory_info().rss, mutated(20)
            for _ in range(12):
                await ill.connected(len(ill.resumed_from) or 1)
                try:
                    for _ in range(25):
                        await ill.write(next(frames))
                except (ConnectionError, AssertionError):
                    pass  # the gateway has had enough of this connection
                ill.drop()
                await is_unharmed(relay, well)
            assert process.memory_info().rss - quiet < 64 * MIB
            assert await is_idle()
            relay.follow([well.heartbeat()])
            with pytest.raises(CallFailed):
                async with relay.start(ill.at, CALL, REQUEST):
                    pass
