"""Streams that outlive their connections, between two gateways' halves and a real Redis that may fail."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Send

from accounts.protocol.records import TeamLimits
from gateway.api.dialect import SHAPE
from gateway.api.http.diagnostics import begin_request_log
from gateway.api.intake.decoding import DecodingThread
from gateway.api.intake.intake import Intake
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.openai.writing import OpenAiErrors
from gateway.api.request_headers import ResumeOptions
from gateway.api.resumable import Resumable
from gateway.call import Principal
from gateway.errors import InternalError, InvalidRequest, StreamGone, TooManyRequests, TooManyStreams
from gateway.resume.reading import Reading
from gateway.resume.recording import MAX_MORE_OF_TEAM, MAX_OF_STREAM, PIECE_BYTES, Recording
from gateway.resume.recordings import Owner, Recordings
from gateway.store.client import connect
from gateway.store.streams import StreamBounds, StreamLog, StreamQuota
from gateway.telemetry.metrics import Metrics
from tests.support.redis_server import RedisServer
from tests.support.team_limits import unlimited
from tests.support.waiting import until
from workers.protocol import keys
from workers.tracing.tracer import NoTracer

OWNER = Owner("blue", "digest")
ANY = Owner("blue", "")
BOUNDS = StreamBounds(max_streams=64, max_bytes=1 << 26)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@asynccontextmanager
async def gateway(
    server: RedisServer,
    max_bytes: int = 1 << 20,
    bounds: StreamBounds = BOUNDS,
    limits_of: Callable[[str], TeamLimits] = unlimited,
) -> AsyncIterator[Recordings]:
    """One process's half."""
    async with connect(server.url) as client:
        quota = StreamQuota(client, bounds, kept_s=30.0, limits_of=limits_of)
        recordings = Recordings(StreamLog(client, kept_s=30.0), quota, "gw", max_bytes)
        running = asyncio.create_task(recordings.run())
        await asyncio.sleep(0)
        try:
            yield recordings
        finally:
            await recordings.close()
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled()


@pytest.fixture
async def here(server: RedisServer) -> AsyncIterator[Recordings]:
    async with gateway(server) as recordings:
        yield recordings


@pytest.fixture
async def there(server: RedisServer) -> AsyncIterator[Recordings]:
    async with gateway(server) as recordings:
        yield recordings


def event(number: int) -> bytes:
    return b"data: %d\n\n" % number


def telling(count: int, pause_s: float = 0.0) -> Callable[[Recording], Awaitable[None]]:
    async def produce(recording: Recording) -> None:
        await recording.start()
        for number in range(1, count + 1):
            recording.write(event(number))
            await asyncio.sleep(pause_s)

    return produce


async def numbers(reading: Reading, count: int | None = None) -> list[int]:
    """What a client reads, by the events' ids, which must be those of their data."""
    found: list[int] = []
    while events := await reading.take():
        for block in events.decode().split("\n\n")[:-1]:
            id_, data = block.split("\n")
            assert id_.rpartition(":")[2] == data.removeprefix("data: ")
            found.append(int(data[6:]))
        if count is not None and len(found) >= count:
            break
    reading.close()
    return found


async def test_read_here_while_it_is_written_and_there_when_it_has_ended(here: Recordings, there: Recordings) -> None:
    reading = await here.begin("a1", OWNER, telling(50, 0.001), 5.0)
    assert await numbers(reading) == list(range(1, 51))
    await asyncio.sleep(0.06)
    for recordings in (here, there):
        for after in (0, 1, 17, 49, 50, 99):
            assert await numbers(await recordings.open("a1", after, OWNER)) == list(range(after + 1, 51))


async def test_read_there_while_it_is_written_here(here: Recordings, there: Recordings) -> None:
    reading = await here.begin("a2", OWNER, telling(100, 0.005), 5.0)
    first = await numbers(reading, 10)
    elsewhere = await there.open("a2", len(first), OWNER)
    assert first + await numbers(elsewhere) == list(range(1, 101))


async def test_of_two_readers_each_gets_everything(here: Recordings) -> None:
    reading = await here.begin("a3", OWNER, telling(30, 0.002), None)
    other = await here.open("a3", 0, ANY)
    first, second = await asyncio.gather(numbers(reading), numbers(other))
    assert first == second == list(range(1, 31))


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_pushed_and_what_is_taken_are_all_events_in_order(here: Recordings, seed: int) -> None:
    chance = random.Random(seed)
    got: list[int] = []
    num_pushed = 0

    def keep(events: bytes) -> None:
        got.extend(int(number) for number in re.findall(rb"data: (\d+)", events))

    def push(events: bytes) -> bool:
        nonlocal num_pushed
        if chance.random() < 0.3:
            return False
        num_pushed += 1
        keep(events)
        return True

    async def produce(recording: Recording) -> None:
        await recording.start()
        number = 0
        while number < 300:
            together = chance.choice((1, 1, 1, 3))
            recording.write(b"".join(event(number + more) for more in range(1, together + 1)))
            number += together
            if chance.random() < 0.7:
                await asyncio.sleep(0)

    reading = await here.begin(f"p{seed}", OWNER, produce, 5.0)
    plain = await here.open(f"p{seed}", 0, ANY)
    others = asyncio.create_task(numbers(plain))
    while events := await reading.take(push):
        keep(events)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    reading.close()
    assert got == await others == list(range(1, len(got) + 1))
    assert num_pushed > 20


async def test_a_pushed_token_wakes_no_task(here: Recordings) -> None:
    going = asyncio.Event()

    async def produce(recording: Recording) -> None:
        await recording.start()
        await going.wait()
        for number in range(1, 101):
            recording.write(event(number))
            await asyncio.sleep(0)

    pushed: list[bytes] = []

    def push(events: bytes) -> bool:
        pushed.append(events)
        return True

    reading = await here.begin("q1", OWNER, produce, 5.0)
    taking = asyncio.create_task(reading.take(push))
    await asyncio.sleep(0)
    going.set()
    assert await taking == b"", "the stream's end"
    assert [one.count(b"data") for one in pushed] == [1] * 100
    reading.close()


async def test_whose_it_is(here: Recordings, there: Recordings) -> None:
    (await here.begin("a4", OWNER, telling(1, 0.3), None)).close()
    for recordings in (here, there):
        with pytest.raises(StreamGone):
            await recordings.open("a4", 0, Owner("green", "digest"))
        with pytest.raises(StreamGone):
            await recordings.open("b4", 0, OWNER)
        with pytest.raises(InvalidRequest):
            await recordings.open("a4", 0, Owner("blue", "another"))
        assert await recordings.alive("a4")
        assert not await recordings.alive("b4")


async def test_who_falls_too_far_behind_gets_no_gap(server: RedisServer, there: Recordings) -> None:
    async with gateway(server, max_bytes=4096) as here:
        reading = await here.begin("a5", OWNER, telling(500), None)
        await asyncio.sleep(0.1)
        with pytest.raises(StreamGone):
            await reading.take()
        for recordings in (here, there):
            with pytest.raises(StreamGone):
                await (await recordings.open("a5", 100, OWNER)).take()
            late = await numbers(await recordings.open("a5", 480, OWNER))
            assert late == list(range(481, 501))


async def test_given_up_when_nobody_reads_it(here: Recordings, there: Recordings) -> None:
    ended = asyncio.Event()

    async def produce(recording: Recording) -> None:
        try:
            await telling(1000, 0.01)(recording)
        finally:
            ended.set()

    loop = asyncio.get_running_loop()
    reading = await here.begin("a6", OWNER, produce, 0.4)
    await asyncio.sleep(0.6)
    assert not ended.is_set(), "while it is read it goes on"
    reading.close()
    elsewhere = await there.open("a6", 0, OWNER)
    assert len(await numbers(elsewhere, 100)) >= 100
    left_at = loop.time()
    async with asyncio.timeout(2):
        await ended.wait()
    assert 0.1 < loop.time() - left_at < 1.5
    await asyncio.sleep(0.1)
    for recordings in (here, there):
        with pytest.raises(StreamGone):
            await recordings.open("a6", 0, OWNER)


async def test_a_reader_elsewhere_that_never_catches_up_is_a_reader(here: Recordings, there: Recordings) -> None:
    (await here.begin("a9", OWNER, telling(10_000, 0.005), 1.5)).close()
    elsewhere = await there.open("a9", 0, OWNER)
    for _ in range(14):
        await asyncio.sleep(0.15)
        assert await elsewhere.take()
    await here.stop("a9")


async def test_cancelled_twice_it_says_its_last_word_all_the_same(here: Recordings) -> None:
    said = asyncio.Event()

    async def produce(recording: Recording) -> None:
        try:
            await telling(1000, 0.01)(recording)
        finally:
            await asyncio.sleep(0.05)
            said.set()

    reading = await here.begin("b1", OWNER, produce, None)
    await reading.take()
    for _ in range(3):
        await here.stop("b1")
        await asyncio.sleep(0.01)
    async with asyncio.timeout(2):
        await said.wait()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_stopped(here: Recordings, there: Recordings, elsewhere: bool) -> None:
    stream = f"a7{int(elsewhere)}"
    reading = await here.begin(stream, OWNER, telling(1000, 0.01), None)
    await reading.take()
    await (there if elsewhere else here).stop(stream)
    async with asyncio.timeout(2):
        assert len(await numbers(reading)) < 900


async def test_a_stream_that_breaks_ends_no_other(here: Recordings) -> None:
    async def breaks(recording: Recording) -> None:
        recording.write(event(1))
        raise ZeroDivisionError

    reading = await here.begin("a8", OWNER, breaks, None)
    other = await here.begin("a9", OWNER, telling(20, 0.002), None)
    assert await numbers(reading) == [1]
    assert isinstance(reading.refusal, InternalError)
    assert await numbers(other) == list(range(1, 21))


async def test_a_redis_that_fails_costs_the_reader_here_nothing() -> None:
    with RedisServer() as server:
        async with gateway(server) as here, gateway(server) as there:
            reading = await here.begin("c1", OWNER, telling(200, 0.005), 5.0)
            begun = await numbers(await there.open("c1", 0, OWNER), 5)
            assert begun[:5] == [1, 2, 3, 4, 5]
            server.kill()
            again = await here.begin("c2", OWNER, telling(5), None)
            assert await numbers(again) == [1, 2, 3, 4, 5]
            server.start()
            assert await numbers(reading) == list(range(1, 201))
            for _ in range(200):  # until the next try to write it
                if await there.alive("c1"):
                    break
                await asyncio.sleep(0.05)
            assert await there.alive("c1"), "it is known again"
            await until(lambda: not here.busy, 5.0, "Redis has all of it")
            assert await numbers(await there.open("c1", 0, OWNER)) == list(range(1, 201))


@pytest.mark.parametrize("num_events", [40, 3000], ids=["in one piece", "in many pieces"])
async def test_what_redis_lost_is_written_anew_as_long_as_the_stream_is_here(
    own_server: RedisServer, num_events: int
) -> None:
    """Only what came later was written, and the whole copy dropped at the end: no gateway had the stream any more."""
    going_on, body = asyncio.Event(), b"x" * 200

    async def produce(recording: Recording) -> None:
        await recording.start()
        for number in range(1, num_events + 1):
            if number == num_events // 2:
                await going_on.wait()
            recording.write(b"data: %d\n\n" % number if number % 2 else b"data: %d\ndata: %b\n\n" % (number, body))

    async with gateway(own_server) as here, gateway(own_server) as there, connect(own_server.url) as client:
        (await here.begin("z1", OWNER, produce, None)).close()
        await asyncio.sleep(0.1)
        assert await client.exists(keys.stream("z1"))
        await client.flushall()
        going_on.set()
        await until(lambda: not here.busy, 10.0, "Redis has all of it")
        told = b""
        reading = await there.open("z1", 0, OWNER)
        while events := await reading.take():
            told += events
        found = [int(number) for number in re.findall(rb"data: (\d+)", told)]
        assert found == list(range(1, num_events + 1))


async def test_a_reader_elsewhere_waits_for_what_redis_lost(own_server: RedisServer) -> None:
    async with gateway(own_server) as here, gateway(own_server) as there, connect(own_server.url) as client:
        (await here.begin("z2", OWNER, telling(300, 0.01), None)).close()
        elsewhere = await there.open("z2", 0, OWNER)
        found = await numbers(elsewhere, 20)
        elsewhere = await there.open("z2", found[-1], OWNER)
        await client.flushall()
        assert found + await numbers(elsewhere) == list(range(1, 301))


async def test_a_stream_counts_no_longer_where_the_clock_of_redis_was_set_back(own_server: RedisServer) -> None:
    """Its end lay an hour ahead then, and the team had a place less for that hour."""
    async with connect(own_server.url) as client:
        quota = StreamQuota(client, StreamBounds(1, 1 << 20), kept_s=30.0, limits_of=unlimited)
        seconds, _ = await client.time()
        for name in (keys.streams("blue"), keys.streams_ended("blue")):
            await client.zadd(name, {f"in {name}": (seconds + 3600) * 1000})
        assert await quota.begin("blue", "f1") is None
        for name, lifetime_s in ((keys.streams("blue"), keys.STREAM_TTL_S), (keys.streams_ended("blue"), 30.0)):
            (found,) = await client.zrange(name, 0, -1, withscores=True)
            assert float(found[1]) / 1000 <= seconds + 2 + lifetime_s


async def test_an_ending_process_leaves_everything_in_redis(server: RedisServer, there: Recordings) -> None:
    async with gateway(server) as here:
        (await here.begin("a10", OWNER, telling(30, 0.005), None)).close()
    assert await numbers(await there.open("a10", 0, OWNER)) == list(range(1, 31))


async def counted(server: RedisServer) -> tuple[int, int, int]:
    """Streams of the team that run and that have ended, and the bytes of both, which must be those of their sizes."""
    async with connect(server.url) as client:
        running, ended = await client.zcard(keys.streams("blue")), await client.zcard(keys.streams_ended("blue"))
        sizes = {name: int(size) for name, size in (await client.hgetall(keys.stream_sizes("blue"))).items()}
        total = sizes.pop(b"all", 0)
        assert total == sum(sizes.values())
        assert len(sizes) == running + ended
        return running, ended, total


async def logged(server: RedisServer) -> int:
    """Bytes of all streams' events in Redis."""
    async with connect(server.url) as client:
        names = [name async for name in client.scan_iter("pd:stream:*:log")]
        entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        for name in names:
            entries += await client.xrange(name)  # type: ignore[arg-type]  # an answer that is bytes here
        return sum(len(fields.get(b"body", b"")) for _, fields in entries)


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


async def test_a_team_runs_so_many_streams_over_all_gateways(own_server: RedisServer) -> None:
    bounds = StreamBounds(max_streams=3, max_bytes=1 << 20)
    async with gateway(own_server, bounds=bounds) as here, gateway(own_server, bounds=bounds) as there:
        readings = [await (here, there, here)[n].begin(f"d{n}", OWNER, telling(10_000, 0.01), None) for n in range(3)]
        for recordings in (here, there):
            with pytest.raises(TooManyStreams, match="may have 3 streams"):
                await recordings.begin("d9", OWNER, telling(1), None)
            with pytest.raises(StreamGone):
                await recordings.open("d9", 0, OWNER)
        other_team = await there.begin("e0", Owner("green", ""), telling(3), None)
        assert await numbers(other_team) == [1, 2, 3]
        readings[1].close()
        await there.stop("d1")
        await until(lambda: not there.busy, 2.0, "its place is free")
        await asyncio.sleep(0.2)  # Redis is told a moment later
        again = await here.begin("d9", OWNER, telling(3), None)
        assert await numbers(again) == [1, 2, 3]
        for n in (0, 2):
            readings[n].close()
            await here.stop(f"d{n}")


async def test_a_team_s_own_limit_of_streams_replaces_the_setting(own_server: RedisServer) -> None:
    """It is lowered, raised and taken away while streams run, and without Redis as well."""
    limits = TeamLimits()
    bounds = StreamBounds(max_streams=2, max_bytes=1 << 20)

    async def most(here: Recordings, prefix: str) -> tuple[int, str]:
        """Begin streams until one is refused; return how many began, and the refusal."""
        begun: list[str] = []
        try:
            while True:
                name = f"{prefix}{len(begun)}"
                (await here.begin(name, OWNER, telling(10_000, 0.01), None)).close()
                begun.append(name)
        except TooManyStreams as refused:
            for name in begun:
                await here.stop(name)
            await until(lambda: not here.busy, 2.0, "all have ended")
            await asyncio.sleep(0.2)  # Redis is told a moment later
            return len(begun), refused.message

    async with gateway(own_server, bounds=bounds, limits_of=lambda team: limits) as here:
        assert await most(here, "k") == (2, refusal(2, "setting `resume_streams_per_team`"))
        limits = TeamLimits(resumable_streams=1)
        assert await most(here, "l") == (1, refusal(1, "limit `resumable_streams` of the team or its organisation"))
        limits = TeamLimits(resumable_streams=4)
        assert await most(here, "m") == (4, refusal(4, "limit `resumable_streams` of the team or its organisation"))
        limits = TeamLimits()
        assert (await most(here, "n"))[0] == 2
        own_server.kill()
        limits = TeamLimits(resumable_streams=1)
        reading = await here.begin("o0", OWNER, telling(10_000, 0.01), None)
        with pytest.raises(TooManyStreams):
            await here.begin("o1", OWNER, telling(1), None)
        own_server.start()
        reading.close()
        await here.stop("o0")


def refusal(number: int, limit: str) -> str:
    return (
        f"This key's team may have {number} streams at a time that outlive their connections, and has them ({limit}). "
        "Send the request again when one has ended, or send it without `x-resume-grace` or `background`."
    )


async def test_a_team_s_own_limit_of_bytes_replaces_the_setting(own_server: RedisServer) -> None:
    """Of streams that have ended as many are kept as fit, and one that runs keeps less from the next renewal on."""
    limits = TeamLimits(resumable_stream_bytes=200_000)
    body = b"data: " + b"x" * 2000 + b"\n\n"

    async def produce(recording: Recording) -> None:
        for _ in range(20):
            recording.write(body)

    async def write_on(recording: Recording) -> None:
        while True:
            recording.write(body)
            await asyncio.sleep(0.005)

    async def run_ended(here: Recordings, prefix: str) -> int:
        """Have eight streams of some 40 KB run; return how many are kept."""
        for number in range(8):
            reading = await here.begin(f"{prefix}{number}", OWNER, produce, None)
            while await reading.take():
                pass
            reading.close()
            await until(lambda: not here.busy, 2.0, "Redis has it all")
        await asyncio.sleep(0.2)
        return (await counted(own_server))[1]

    bounds = StreamBounds(max_streams=64, max_bytes=100_000)
    async with gateway(own_server, bounds=bounds, limits_of=lambda team: limits) as here:
        assert await run_ended(here, "p") == 4
        limits = TeamLimits(resumable_stream_bytes=1 << 16)
        assert await run_ended(here, "q") == 1
        assert await logged(own_server) <= 1 << 16, "what made room for a new stream is gone"
        limits = TeamLimits()
        assert await run_ended(here, "r") == 2
        limits = TeamLimits(resumable_stream_bytes=1 << 20)
        (await here.begin("s", OWNER, write_on, None)).close()
        await asyncio.sleep(1.5)
        assert await logged(own_server) > 200_000
        limits = TeamLimits(resumable_stream_bytes=1 << 16)
        await asyncio.sleep(keys.STREAM_RENEW_S + 0.5)
        assert await logged(own_server) < 100_000
        await here.stop("s")


async def test_the_place_of_a_gateway_that_is_gone_is_free_again(own_server: RedisServer) -> None:
    async with connect(own_server.url) as client:
        quota = StreamQuota(client, StreamBounds(1, 1 << 20), kept_s=30.0, limits_of=unlimited)
        assert await quota.begin("blue", "f0")
        assert await quota.begin("blue", "f1") is None
        await client.zadd(keys.streams("blue"), {"f0": 1})
        assert await quota.begin("blue", "f1")
        assert await counted(own_server) == (1, 0, 0)


async def test_without_redis_each_gateway_counts_its_own(own_server: RedisServer) -> None:
    async with gateway(own_server, bounds=StreamBounds(max_streams=2, max_bytes=1 << 20)) as here:
        own_server.kill()
        readings = [await here.begin(f"g{n}", OWNER, telling(10_000, 0.01), None) for n in range(2)]
        with pytest.raises(TooManyStreams):
            await here.begin("g9", OWNER, telling(1), None)
        own_server.start()
        for n, reading in enumerate(readings):
            reading.close()
            await here.stop(f"g{n}")


async def test_what_a_team_keeps_is_bounded_and_the_oldest_make_room(own_server: RedisServer) -> None:
    """Twelve streams of some 40 KB each, one after the other, of which the team may keep 100 KB."""
    bounds = StreamBounds(max_streams=64, max_bytes=100_000)
    body = b"data: " + b"x" * 2000 + b"\n\n"

    async def produce(recording: Recording) -> None:
        for _ in range(20):
            recording.write(body)

    async with gateway(own_server, bounds=bounds) as here:
        for n in range(12):
            reading = await here.begin(f"h{n}", OWNER, produce, None)
            while await reading.take():
                pass
            reading.close()
            await until(lambda: not here.busy, 2.0, "Redis has it all")
            # One that runs counts with what it had at its last renewal.
            assert await logged(own_server) <= bounds.max_bytes
        running, ended, total = await counted(own_server)
        assert (running, ended) == (0, 2)
        assert 80_000 < total <= bounds.max_bytes
        assert (await here.open("h11", 0, OWNER)).refusal is None
        with pytest.raises(StreamGone):
            await here.open("h0", 0, OWNER)


async def test_of_many_that_run_each_keeps_its_share(own_server: RedisServer) -> None:
    bounds = StreamBounds(max_streams=64, max_bytes=200_000)
    body = b"data: " + b"x" * 1000 + b"\n\n"

    async def produce(recording: Recording) -> None:
        for _ in range(300):
            recording.write(body)
            await asyncio.sleep(0.01)

    async with gateway(own_server, bounds=bounds) as here:
        for n in range(10):
            (await here.begin(f"i{n}", OWNER, produce, None)).close()
        await asyncio.sleep(2.5)
        assert await logged(own_server) <= bounds.max_bytes * 1.2
        for n in range(10):
            await here.stop(f"i{n}")


async def test_a_stream_that_somebody_holds_on_to_counts_as_running(own_server: RedisServer) -> None:
    """What has ended is in this process's memory as long as a client reads it, however slowly."""
    async with gateway(own_server, bounds=StreamBounds(max_streams=2, max_bytes=1 << 20)) as here:
        readings = [await here.begin(f"j{n}", OWNER, telling(5), 5.0) for n in range(2)]
        await asyncio.sleep(0.2)
        with pytest.raises(TooManyStreams):
            await here.begin("j9", OWNER, telling(1), 5.0)
        for reading in readings:
            assert await numbers(reading) == [1, 2, 3, 4, 5]
        await until(lambda: not here.busy, 2.0, "nobody reads")
        await asyncio.sleep(0.2)  # Redis is told a moment later
        assert await numbers(await here.begin("j9", OWNER, telling(1), 5.0)) == [1]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_stream_has_so_many_readers(here: Recordings, there: Recordings, elsewhere: bool) -> None:
    """A thousand of them were a thousand tasks for each of its tokens, or asked Redis 30,000 times a second."""
    stream, at = f"k-{elsewhere}", there if elsewhere else here
    first = await here.begin(stream, OWNER, telling(10_000, 0.01), None)
    readings = [await at.open(stream, 0, ANY) for _ in range(MAX_OF_STREAM - (not elsewhere))]
    with pytest.raises(TooManyRequests, match=f"{MAX_OF_STREAM} connections read this stream") as refused:
        await at.open(stream, 0, ANY)
    assert refused.value.retry_after_s
    for _ in range(2):  # a second time gives no second place back
        readings[0].close()
    readings[0] = await at.open(stream, 0, ANY)
    with pytest.raises(TooManyRequests):
        await at.open(stream, 0, ANY)
    for reading in (first, *readings):
        reading.close()
    await here.stop(stream)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_team_has_so_many_readers(here: Recordings, there: Recordings, elsewhere: bool) -> None:
    """The first one of each stream has a place all the same: clients come back to as many as they left."""
    at, num_streams = there if elsewhere else here, MAX_MORE_OF_TEAM // 4 + 1
    streams = [f"l-{number}-{elsewhere}" for number in range(num_streams)]
    for stream in streams:
        (await here.begin(stream, OWNER, telling(10_000, 0.05), None)).close()
    readings = [await at.open(stream, 0, ANY) for stream in streams[:-1] for _ in range(5)]
    with pytest.raises(TooManyRequests, match=f"{MAX_MORE_OF_TEAM} connections of this key's team"):
        await at.open(streams[0], 0, ANY)
    readings.append(await at.open(streams[-1], 0, ANY))
    with pytest.raises(TooManyRequests):
        await at.open(streams[-1], 0, ANY)
    (await here.begin(f"green-{elsewhere}", Owner("green", ""), telling(10_000, 0.05), None)).close()
    others = [await at.open(f"green-{elsewhere}", 0, Owner("green", "")) for _ in range(2)]
    readings.pop(0).close()
    readings.append(await at.open(streams[-1], 0, ANY))
    for reading in (*readings, *others):
        reading.close()
    for stream in (*streams, f"green-{elsewhere}"):
        await here.stop(stream)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_however_a_reader_leaves_its_place_is_free(here: Recordings, there: Recordings, elsewhere: bool) -> None:
    stream, at = f"m-{elsewhere}", there if elsewhere else here
    first = await here.begin(stream, OWNER, telling(10_000, 0.01), None)
    resumable, lane, leaves = Resumable(at, Metrics(CollectorRegistry()), 60.0), DecodingThread(), asyncio.Event()
    num_reading = 0

    async def stay() -> Message:
        await asyncio.Event().wait()
        return {}

    async def leave() -> Message:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def read(message: Message) -> None:
        nonlocal num_reading
        num_reading += message["type"] == "http.response.start"

    async def break_off(message: Message) -> None:
        await read(message)
        await leaves.wait()
        raise OSError("connection reset")

    async def ask(receive: Receive, send: Send, num_bytes: int = 1 << 20) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], SHAPE: OpenAiErrors()}
        begin_request_log(scope, NoTracer())
        principal = Principal("k", "blue", None, admin=False)
        with closing(Intake(1 << 20, MemoryBudget(num_bytes), lane, lambda: 0).message(principal, b"")) as body:
            await resumable.again(ResumeOptions(ANY, 0.0, stream, 0), body, scope, receive, send)

    ways = {"cancelled": (stay, read), "the client leaves": (leave, read), "sending fails": (stay, break_off)}
    for name, way in ways.items():
        num_reading = 0
        leaves.clear()
        readers = [asyncio.create_task(ask(*way)) for _ in range(MAX_OF_STREAM - (not elsewhere))]
        await until(lambda: num_reading == len(readers), 5.0, name)  # noqa: B023 - it is awaited here
        with pytest.raises(TooManyRequests):
            await at.open(stream, 0, ANY)
        leaves.set()
        if name == "cancelled":
            for reader in readers:
                reader.cancel()
        await asyncio.wait(readers, timeout=5.0)
        assert all(reader.done() and (reader.cancelled() or reader.exception()) for reader in readers)
    for _ in range(2 * MAX_OF_STREAM):
        await ask(stay, read, num_bytes=0)  # there is no memory for what it reads
    first.close()
    assert not at._readers._of_stream
    assert not at._readers._more_of_team
    await here.stop(stream)


async def test_idle_it_sleeps(here: Recordings) -> None:
    await numbers(await here.begin("a11", OWNER, telling(3), None))
    await until(lambda: not here.busy, 1.0, "Redis has it all")


EVENT_BYTES, NUM_EVENTS = 2000, 400
NUM_UNREAD, NUM_STREAMS = 60, 10


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_readers_who_read_nothing_hold_little_and_what_is_counted(
    here: Recordings, there: Recordings, elsewhere: bool
) -> None:
    """Each held the whole of what was kept, twice, and nobody counted it."""

    async def produce(recording: Recording) -> None:
        await recording.start()
        for number in range(NUM_EVENTS):
            recording.write(b"data: %0*d\n\n" % (EVENT_BYTES, number))
            await asyncio.sleep(0.03 if number % 40 == 0 else 0)

    streams = [f"unread-{number}-{elsewhere}" for number in range(NUM_STREAMS)]
    firsts = [await here.begin(stream, OWNER, produce, None) for stream in streams]
    await until(lambda: all(first.recording.settled for first in firsts), 10.0, "Redis has all of it")
    budget = MemoryBudget(16 << 20)
    resumable = Resumable(there if elsewhere else here, Metrics(CollectorRegistry()), 60.0)
    statuses, read = Counter[int](), Counter[int]()

    async def stay() -> Message:
        await asyncio.Event().wait()
        return {}

    async def ask(reader: int) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses[message["status"]] += 1
            elif message.get("more_body"):
                read[reader] += len(message["body"])
                if read[reader] > NUM_EVENTS * EVENT_BYTES // 2:
                    await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], SHAPE: OpenAiErrors()}
        begin_request_log(scope, NoTracer())
        body = Intake(1 << 20, budget, lane, lambda: 0).message(Principal("k", "blue", None, admin=False), b"")
        with closing(body):
            await resumable.again(ResumeOptions(OWNER, 0.0, streams[reader % NUM_STREAMS], 0), body, scope, stay, send)

    lane = DecodingThread()
    readers = [asyncio.create_task(ask(number)) for number in range(NUM_UNREAD)]
    await until(lambda: statuses.total() == NUM_UNREAD, 10.0, "all are answered")
    await until(
        lambda: any(reader.done() for reader in readers), 10.0, "those beyond the bound are refused, or end early"
    )
    num_open = sum(not reader.done() for reader in readers)
    assert num_open * PIECE_BYTES // 2 < budget.num_bytes < num_open * 5 * PIECE_BYTES
    assert budget.num_bytes <= budget.largest
    for first in firsts:
        first.close()
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    assert budget.num_bytes == 0
    told = b""
    reading = await there.open(streams[0], 100, OWNER)
    while events := await reading.take():
        told += events
    assert [int(number) for number in re.findall(rb"data: (\d+)", told)] == list(range(100, NUM_EVENTS))
