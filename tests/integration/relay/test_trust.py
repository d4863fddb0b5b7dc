"""What a gateway believes of a worker, and how little it takes from one that is none of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from msgspec.structs import replace

from gateway.api.intake.disconnect import beside
from gateway.relay import worker_stream
from gateway.relay.event_source import (
    MAX_EMPTY_BYTES,
    MAX_HEAD_BYTES,
    EventStreamBroken,
    EventStreamRefused,
    read_events,
)
from gateway.relay.relay import Relay
from tests.integration.relay.scripted import CALL, ScriptedWorker, scripted_worker
from tests.integration.relay.test_relay import REQUEST, end, failure_of, raw_server
from tests.support.waiting import until
from workers.protocol.events import (
    CallEvent,
    CallFailed,
    Failure,
    FailureCode,
    Text,
    encode_alive,
    encode_step,
)
from workers.protocol.framing import ALIVE_EVENT, KEEP_ALIVE, FrameReader, encode_frame, event_id
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.queries import PROPS_PATH, RENDER_PATH, Render, decode_props, decode_rendered

SECRET = "secret"
MIB = 1 << 20
MANY_FRAMES = 256


@asynccontextmanager
async def following(worker: ScriptedWorker) -> AsyncIterator[Relay]:
    relay = Relay("gw", SECRET, 600)
    async with beside(relay.run()):
        await asyncio.sleep(0)
        relay.follow([worker.heartbeat()])
        yield relay


async def placed(relay: Relay, at: WorkerAddress) -> Failure:
    """Why the call that goes to this place fails."""
    try:
        async with relay.start(at, CALL, REQUEST) as mailbox:
            return await failure_of(mailbox)
    except CallFailed as failed:
        return failed.failure


async def test_whoever_can_not_prove_the_secret_gets_no_prompt_and_no_secret() -> None:
    """It listens where a sealed record says, as after a worker's death, and has no secret."""
    async with scripted_worker(secret="guessed") as fake, following(fake) as relay:
        assert (await placed(relay, fake.at)).code is FailureCode.WORKER_LOST
        with pytest.raises(CallFailed):
            await relay.ask(fake.at, "POST", RENDER_PATH, Render(request=REQUEST), decode_rendered)
        assert (fake.submits, fake.asked) == ([], [])
        assert not any(SECRET in shown for shown in fake.secrets)


async def test_a_token_of_one_process_is_none_of_another() -> None:
    async with scripted_worker() as one, scripted_worker(boot="boot2") as other:
        async with following(one), following(other):
            await one.connected()
            await other.connected()
        assert len(one.secrets | other.secrets) == 2


async def test_calls_go_where_the_sealed_record_says_whatever_the_lease_does() -> None:
    """The address in a lease comes from a field that is not sealed."""
    async with scripted_worker() as true, scripted_worker() as fake, following(true) as relay:
        forged = replace(true.at, url=fake.address)
        async with relay.start(forged, CALL, REQUEST):
            await true.submitted(1)
        assert (fake.submits, fake.resumed_from) == ([], [])


async def test_a_lease_of_another_models_worker_is_none() -> None:
    async with scripted_worker() as worker, following(worker) as relay:
        await worker.connected()
        for at in (replace(worker.at, model="large"), replace(worker.at, worker="w2")):
            assert (await placed(relay, at)).code is FailureCode.WORKER_LOST
        assert worker.submits == []


async def test_a_process_that_no_record_tells_of_is_sent_nothing() -> None:
    async with scripted_worker() as true, scripted_worker(boot="boot2") as unknown, following(true) as relay:
        began = time.monotonic()
        assert (await placed(relay, unknown.at)).code is FailureCode.WORKER_LOST
        assert time.monotonic() - began < 5
        assert (unknown.submits, unknown.resumed_from) == ([], [])


async def test_a_process_whose_record_comes_a_moment_later_is_sent_the_call() -> None:
    async with scripted_worker() as old, scripted_worker(boot="boot2") as new, following(old) as relay:
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, relay.follow, [old.heartbeat(), new.heartbeat()])
        async with relay.start(new.at, CALL, REQUEST):
            await new.submitted(1)


async def test_redirects_are_not_followed() -> None:
    async with scripted_worker() as elsewhere, scripted_worker(redirects_to=elsewhere.address) as worker:
        async with following(worker) as relay:
            await placed(relay, worker.at)
            with pytest.raises(CallFailed):
                await relay.ask(worker.at, "POST", RENDER_PATH, Render(request=REQUEST), decode_rendered)
        assert (len(worker.submits), len(worker.asked)) == (1, 1)
        assert (elsewhere.submits, elsewhere.asked) == ([], [])


async def test_answers_that_never_end_are_cut_off() -> None:
    async with scripted_worker(reply_bytes=1 << 30) as worker, following(worker) as relay:
        before = psutil.Process().memory_info().rss
        assert (await placed(relay, worker.at)).code is FailureCode.WORKER_LOST
        with pytest.raises(CallFailed, match="ReplyTooLong"):
            await relay.ask(worker.at, "GET", PROPS_PATH, None, decode_props)
        assert worker.num_sent < 64 * MIB
        assert psutil.Process().memory_info().rss - before < 128 * MIB


async def test_events_as_long_as_frames_may_be_overflow_by_their_bytes() -> None:
    """By their number alone, 600 of them would take gigabytes."""
    overflowed = asyncio.Event()
    async with (
        scripted_worker() as worker,
        following(worker) as relay,
        relay.start(worker.at, CALL, REQUEST, on_overflow=lambda error: overflowed.set()),
    ):
        number = (await worker.submitted(1))[0]
        for _ in range(8):
            await worker.say([Text(number, "x" * (8 * MIB))])
        async with asyncio.timeout(10):
            await overflowed.wait()


async def test_steps_that_come_faster_than_they_are_read_lose_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound that one read passes: how quick the machine is decides whether others are passed."""
    monkeypatch.setattr(worker_stream, "MAX_BACKLOG_FRAMES", 4 * MANY_FRAMES)
    async with (
        scripted_worker() as worker,
        following(worker) as relay,
        relay.start(worker.at, CALL, REQUEST) as mailbox,
    ):
        await worker.submitted(1)
        with contextlib.suppress(OSError):
            await worker.write(b"data: []\n\n" * 16 * MANY_FRAMES)
        assert "cannot read" in (await failure_of(mailbox)).message


async def test_what_can_not_be_read_among_many_steps_loses_the_worker_and_stops_nothing() -> None:
    """Found while a backlog is worked off, it left the next connection waiting for it in a loop without a pause."""
    async with scripted_worker() as worker, following(worker) as relay:
        async with relay.start(worker.at, CALL, REQUEST) as mailbox:
            await worker.submitted(1)
            await worker.write(b"data: []\n\n" * 3 * MANY_FRAMES + b"data: [nonsense\n\n" + b"data: []\n\n" * 999)
            assert "cannot read" in (await failure_of(mailbox)).message
        await worker.write(KEEP_ALIVE)
        await worker.connected(2)
        await until(lambda: not relay.is_lost(worker.boot), 3.0, "the gateway hears that it is back")
        async with relay.start(worker.at, CALL, REQUEST):
            await worker.submitted(2)


async def test_a_head_that_never_ends_breaks_the_stream() -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\nX: ", *[b"x" * MAX_HEAD_BYTES] * 4, pause_s=0.01) as url:
        with pytest.raises(EventStreamBroken, match="head"):
            await read_events(url, {}, on_open=lambda: None, on_data=lambda _: 0.0, connect_timeout_s=1, silence_s=2)


@pytest.mark.parametrize("status", ["200 OK", "401 No"])
async def test_a_trailer_that_never_ends_breaks_the_stream(status: str) -> None:
    """The parser keeps it and copies all of it with each read."""
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ".encode()
    async with raw_server(head, *[b"x" * MAX_EMPTY_BYTES] * 4, pause_s=0.01) as url:
        with pytest.raises(EventStreamBroken, match="without one of the body"):
            await read_events(url, {}, on_open=lambda: None, on_data=lambda _: 0.0, connect_timeout_s=1, silence_s=2)


async def test_chunks_of_a_byte_each_are_a_body_however_many_they_are() -> None:
    heard: list[bytes] = []

    def on_data(data: bytes) -> float:
        heard.append(data)
        return 0.0

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"1\r\na\r\n" * 5000
    async with raw_server(head, *[chunks] * 4, b"0\r\n\r\n", pause_s=0.01) as url:
        with pytest.raises(EventStreamBroken, match="closed the stream"):
            await read_events(url, {}, on_open=lambda: None, on_data=on_data, connect_timeout_s=1, silence_s=2)
    assert b"".join(heard) == b"a" * 20000


async def test_a_refusal_that_never_ends_is_read_as_far_as_it_is_told() -> None:
    head = b"HTTP/1.1 401 No\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (65536, b"n" * 65536)
    async with raw_server(head, *[chunk] * 8, pause_s=0.01) as url:
        with pytest.raises(EventStreamRefused, match="HTTP 401: nnn") as refused:
            await read_events(url, {}, on_open=lambda: None, on_data=lambda _: 0.0, connect_timeout_s=1, silence_s=2)
    assert len(str(refused.value)) < 3000


def test_a_long_frame_that_comes_byte_by_byte_costs_what_its_bytes_do() -> None:
    """Copied and searched anew with each of them, eight MiB so held up the whole gateway for minutes."""
    reader = FrameReader()
    reader.feed(b"data: " + b"x" * (8 * MIB))
    began = time.process_time()
    for _ in range(20_000):
        assert reader.feed(b"y") == []
    assert time.process_time() - began < 1.0
    [frame] = reader.feed(b"\n\n")
    assert len(frame.data) == 8 * MIB + 20_000


async def test_a_worker_that_is_gone_has_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the backlog when its connection ends and its record leaves the fleet."""
    monkeypatch.setattr(worker_stream, "TURN_S", 1e-9)
    async with scripted_worker() as worker, following(worker) as relay:
        async with relay.start(worker.at, CALL, REQUEST) as mailbox:
            number = (await worker.submitted(1))[0]
            said: list[CallEvent] = [*[Text(number, "a")] * MANY_FRAMES, end(number)]
            await worker.say(*([event] for event in said))
            events = await mailbox.take()
            await worker.stop()
            relay.follow([])
            async with asyncio.timeout(5):
                while not mailbox.ended:
                    events += await mailbox.take()
            assert events == said
        assert relay.is_lost(worker.boot)


async def test_a_call_made_after_a_list_of_living_calls_has_come_is_not_missing_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list lies in the backlog, and is read when further calls have been sent to the worker."""
    monkeypatch.setattr(worker_stream, "TURN_S", 1e-9)
    async with (
        scripted_worker() as worker,
        following(worker) as relay,
        relay.start(worker.at, CALL, REQUEST) as early,
        relay.start(worker.at, CALL, REQUEST) as missing,
    ):
        kept = min(await worker.submitted(2))
        frames = [encode_frame(encode_step([Text(kept, "a")]), event_id(worker.boot, 1))] * MANY_FRAMES
        frames.append(encode_frame(encode_alive([kept]), event_id(worker.boot, 1), ALIVE_EVENT))
        await worker.write(b"".join(frames))
        await early.take()
        async with relay.start(worker.at, CALL, REQUEST) as late:
            number = max(await worker.submitted(3))
            assert (await failure_of(missing)).code is FailureCode.OVERRUN
            await worker.say([end(kept), end(number)])
            async with asyncio.timeout(5):
                assert await late.take() == [end(number)]


async def test_what_breaks_over_one_workers_events_stops_no_others() -> None:
    async with (
        scripted_worker() as ill,
        scripted_worker(boot="boot2") as well,
        following(ill) as relay,
    ):
        relay.follow([ill.heartbeat(), well.heartbeat()])
        await well.connected()

        def broken(end: object) -> None:
            raise ZeroDivisionError

        async with (
            relay.start(ill.at, CALL, REQUEST, on_end=broken) as mailbox,
            relay.start(ill.at, CALL, REQUEST) as beside_it,
            relay.start(well.at, CALL, REQUEST) as elsewhere,
        ):
            [first, _] = await ill.submitted(2)
            number = (await well.submitted(1))[0]
            await ill.say([end(first)])
            assert (await failure_of(beside_it)).code is FailureCode.WORKER_LOST
            await well.say([Text(number, "a")])
            assert await elsewhere.take() == [Text(number, "a")]
            assert not mailbox.ended
