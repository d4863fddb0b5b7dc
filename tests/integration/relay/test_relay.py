"""The relay against a worker that says exactly what each test needs, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from gateway.api.intake.disconnect import beside
from gateway.dispatch.suitable_workers import BLAMED
from gateway.dispatch.upstream import ERRORS, error_for
from gateway.errors import ClientTooSlow, InternalError, MemoryFull, PaddockError
from gateway.relay.event_source import EventStreamBroken, read_events
from gateway.relay.mailbox import Mailbox
from gateway.relay.relay import Relay
from gateway.relay.worker_client import WorkerClient
from tests.integration.relay.scripted import CALL, ScriptedWorker, scripted_worker
from tests.support.waiting import until
from workers.protocol.control import access_token
from workers.protocol.events import (
    RETRYABLE,
    CallEvent,
    CallFailed,
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
from workers.protocol.framing import KEEP_ALIVE
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.queries import RENDER_PATH, TOKENIZE_PATH, Render, Tokenize, decode_props, decode_rendered
from workers.protocol.requests import GenerateRequest, Message

REQUEST = GenerateRequest(messages=(Message(role="user", content="hi"),))


def end(call: int) -> Finished:
    return Finished(call, FinishReason.STOP, Usage(1, 1, 0), Timings(0, 1, 1.0, 1, 1.0))


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker() as running:
        yield running


@pytest.fixture
async def relay(worker: ScriptedWorker) -> AsyncIterator[Relay]:
    """Follows the worker; its stream is open."""
    running = Relay("gw", "secret", 600)
    async with beside(running.run()):
        await asyncio.sleep(0)
        running.follow([worker.heartbeat()])
        await worker.connected()
        yield running


@contextlib.asynccontextmanager
async def call(relay: Relay, worker: ScriptedWorker) -> AsyncIterator[tuple[int, Mailbox]]:
    """A call that the worker has been asked for: its number and its mailbox."""
    before = len(worker.submits)
    async with relay.start(worker.at, CALL, REQUEST) as mailbox:
        yield (await worker.submitted(before + 1))[-1], mailbox


async def drained(mailbox: Mailbox) -> list[CallEvent]:
    """All events up to the end."""
    events: list[CallEvent] = []
    async with asyncio.timeout(5):
        while not mailbox.ended:
            events += await mailbox.take()
    return events


async def failure_of(mailbox: Mailbox) -> Failure:
    last = (await drained(mailbox))[-1]
    assert isinstance(last, Failed)
    return last.failure


async def test_what_the_caller_wants_travels_with_the_call(relay: Relay, worker: ScriptedWorker) -> None:
    begin_by = time.time() + 0.25
    async with relay.start(worker.at, replace(CALL, begin_by=begin_by), REQUEST):
        await worker.submitted(1)
    [submit] = worker.submits
    assert (submit.request, submit.tenant, submit.request_id) == (REQUEST, "team", "request")
    assert submit.deadline == begin_by


async def test_the_stream_is_open_before_any_call_and_carries_a_token(relay: Relay, worker: ScriptedWorker) -> None:
    assert worker.submits == []
    async with call(relay, worker):
        assert worker.secrets == {f"Bearer {access_token('secret', 'w1', worker.boot)}"}
        assert worker.submits[0].gateway == "gw"
        assert worker.submits[0].tenant == "team"
        assert worker.submits[0].request == REQUEST


async def test_events_find_their_calls(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (one, first), call(relay, worker) as (two, second):
        await worker.say([Started(one, 0, 1, 0), Started(two, 1, 1, 0)], [Text(two, "b"), Text(one, "a")])
        await worker.say([end(one)], [Text(two, "c"), end(two)])
        assert await drained(first) == [Started(one, 0, 1, 0), Text(one, "a"), end(one)]
        assert await drained(second) == [Started(two, 1, 1, 0), Text(two, "b"), Text(two, "c"), end(two)]
    await asyncio.sleep(0.05)
    assert worker.cancels == []


@pytest.mark.serial
async def test_leaving_early_cancels_at_once(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (number, mailbox):
        await worker.say([Started(number, 0, 1, 0)])
        await mailbox.take()
        left = time.monotonic()
    assert time.monotonic() - left < 0.02
    assert await until(lambda: worker.cancels == [(number,)], 1.0, "the cancel arrives") < 0.1


async def test_a_call_left_while_it_is_submitted_is_cancelled_too(relay: Relay, worker: ScriptedWorker) -> None:
    async with relay.start(worker.at, CALL, REQUEST):
        pass
    await until(lambda: len(worker.cancels) == 1, 1.0, "the cancel arrives")


@pytest.mark.parametrize("what", ["submit", "cancel"])
async def test_an_unforeseen_error_of_one_call_ends_no_other(
    relay: Relay, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A defect of the HTTP client (an AttributeError) ended the gateway, with all its calls."""

    async def broken(client: WorkerClient, *_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'getall'")

    async with call(relay, worker) as (number, mailbox):
        with monkeypatch.context() as patched:
            patched.setattr(WorkerClient, what, broken)
            async with relay.start(worker.at, CALL, REQUEST) as ill:
                if what == "submit":
                    assert (await failure_of(ill)).code is FailureCode.WORKER_LOST
            await asyncio.sleep(0.05)
        await worker.say([end(number)])
        assert await drained(mailbox) == [end(number)]
    async with call(relay, worker):
        pass
    await until(
        lambda: len({one for batch in worker.cancels for one in batch}) == 2, 1.0, "both are cancelled after all"
    )


async def test_cancels_that_come_together_travel_together(relay: Relay, worker: ScriptedWorker) -> None:
    worker.cancel_delay_s = 0.05
    async with contextlib.AsyncExitStack() as calls:
        numbers = [(await calls.enter_async_context(call(relay, worker)))[0] for _ in range(5)]
    await until(lambda: sum(map(len, worker.cancels)) == 5, 1.0, "all cancels arrive")
    assert [sorted(batch) for batch in worker.cancels] == [numbers]
    async with contextlib.AsyncExitStack() as calls:
        for _ in range(3):
            await calls.enter_async_context(call(relay, worker))
        async with call(relay, worker):
            pass
        await until(lambda: len(worker.cancels) == 2, 1.0, "the first cancel is on its way")
    await until(lambda: sum(map(len, worker.cancels)) == 9, 1.0, "all cancels arrive")
    assert [len(batch) for batch in worker.cancels[1:]] == [1, 3]


async def test_a_dropped_connection_is_resumed(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (number, mailbox):
        await worker.say([Started(number, 0, 1, 0)], [Text(number, "a")])
        assert len(await mailbox.take()) == 2
        worker.drop()
        await worker.connected(2)
        assert worker.resumed_from == ["", "boot1-2"]
        await worker.say([Text(number, "b"), end(number)])
        assert await drained(mailbox) == [Text(number, "b"), end(number)]


async def test_calls_that_the_worker_lost_meanwhile_end_and_strangers_are_cancelled(
    relay: Relay, worker: ScriptedWorker
) -> None:
    async with call(relay, worker) as (lost, first), call(relay, worker) as (kept, second):
        worker.drop()
        await worker.connected(2)
        await worker.say_alive([kept, 999])
        failure = await failure_of(first)
        assert failure.code is FailureCode.WORKER_LOST
        assert "w1" in failure.message
        await worker.say([end(kept)])
        assert await drained(second) == [end(kept)]
        await until(lambda: worker.cancels == [(lost, 999)], 1.0, "the strangers are cancelled")


async def test_calls_whose_events_were_read_too_late_fail_but_not_by_the_worker(
    relay: Relay, worker: ScriptedWorker
) -> None:
    async with call(relay, worker) as (late, first), call(relay, worker) as (kept, second):
        await worker.say([Started(late, 0, 1, 0), Started(kept, 0, 1, 0)])
        assert type(await second.peek()) is Started
        await worker.say_alive([kept])
        failure = await failure_of(first)
        assert failure.code is FailureCode.OVERRUN
        assert failure.code not in BLAMED
        assert "w1" in failure.message
        assert "too late" in failure.message
        await worker.say([end(kept)])
        assert (await drained(second))[-1] == end(kept)


@pytest.mark.serial
async def test_a_worker_that_is_gone_is_lost_within_half_a_second(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (number, mailbox):
        await worker.say([Started(number, 0, 1, 0)])
        await worker.stop()
        gone = time.monotonic()
        failure = await failure_of(mailbox)
        assert failure.code is FailureCode.WORKER_LOST
        assert 0.1 < time.monotonic() - gone < 0.6
    assert relay.is_lost("boot1")
    asked = time.monotonic()
    with pytest.raises(CallFailed) as caught:
        async with relay.start(worker.at, CALL, REQUEST):
            pass
    assert caught.value.failure.code is FailureCode.WORKER_LOST
    assert time.monotonic() - asked < 0.05


async def test_a_worker_that_comes_back_is_used_again(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (number, mailbox):
        await worker.stop()
        await failure_of(mailbox)
        await worker.start()
        await worker.connected(2)
        await until(lambda: not relay.is_lost("boot1"), 1.0, "the worker is there again")
        # It had not died: the call that was given up must not go on for nobody.
        await until(lambda: (number,) in worker.cancels, 1.0, "the lost call is cancelled")
        async with call(relay, worker) as (again, second):
            await worker.say([end(again)])
            assert await drained(second) == [end(again)]


async def test_a_new_process_in_the_same_place_ends_the_old_calls_at_once(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (_, mailbox):
        relay.follow([worker.heartbeat(boot="boot2")])
        failure = await failure_of(mailbox)
        assert "restarted" in failure.message


async def test_a_missing_record_alone_ends_nothing(relay: Relay, worker: ScriptedWorker) -> None:
    """Redis may have lost it; the stream says that the worker is there."""
    async with call(relay, worker) as (number, mailbox):
        relay.follow([])
        await worker.say([Text(number, "a")])
        assert await mailbox.take() == [Text(number, "a")]
        worker.drop()
        assert (await failure_of(mailbox)).code is FailureCode.WORKER_LOST
    await until(lambda: not relay.is_lost("boot1"), 1.0, "nobody holds on to it any more")


@pytest.mark.parametrize("code", [FailureCode.BUSY, FailureCode.CONTEXT_OVERFLOW, FailureCode.INVALID_REQUEST])
async def test_a_refused_submit_is_a_failed_event(relay: Relay, worker: ScriptedWorker, code: FailureCode) -> None:
    worker.refusal = Failure(code, "no", "messages")
    async with call(relay, worker) as (_, mailbox):
        assert await failure_of(mailbox) == worker.refusal
    await asyncio.sleep(0.02)
    assert worker.cancels == []


async def test_a_worker_with_another_secret_is_lost_and_says_so() -> None:
    async with scripted_worker(stream_status=401) as worker:
        relay = Relay("gw", "secret", 600)
        async with beside(relay.run()):
            await asyncio.sleep(0)
            relay.follow([worker.heartbeat()])
            with pytest.raises(CallFailed):
                async with relay.start(worker.at, CALL, REQUEST):
                    pass
    answer = error_for(Failure(FailureCode.UNAUTHORIZED, "secret"))
    assert isinstance(answer, InternalError)
    assert "PADDOCK_WORKER_SECRET" in answer.message


async def test_events_that_cannot_be_read_lose_the_worker(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (_, mailbox):
        await worker.write(b"id: boot1-1\ndata: [nonsense\n\n")
        assert "cannot read" in (await failure_of(mailbox)).message


async def test_a_backlog_does_not_look_like_a_slow_reader(relay: Relay, worker: ScriptedWorker) -> None:
    """More steps than the mailbox holds arrive in one piece; a reader that keeps up gets them all."""
    overflowed: list[PaddockError] = []
    async with relay.start(worker.at, CALL, REQUEST, on_overflow=overflowed.append) as mailbox:
        number = (await worker.submitted(1))[0]
        reading = asyncio.create_task(drained(mailbox))
        steps: list[list[CallEvent]] = [[Text(number, str(n))] for n in range(3000)]
        await worker.say(*steps, [end(number)])
        events = await reading
    assert not overflowed
    assert [event.text for event in events if isinstance(event, Text)] == [str(n) for n in range(3000)]


async def test_a_slow_reader_overflows_and_the_others_go_on(relay: Relay, worker: ScriptedWorker) -> None:
    overflowed: list[PaddockError] = []
    async with relay.start(worker.at, CALL, REQUEST, on_overflow=overflowed.append):
        slow = (await worker.submitted(1))[0]
        async with call(relay, worker) as (quick, mailbox):
            steps: list[list[CallEvent]] = [[Text(slow, "x")] for _ in range(700)]
            await worker.say(*steps, [end(quick)])
            assert await drained(mailbox) == [end(quick)]
            assert [type(error) for error in overflowed] == [ClientTooSlow]


@contextlib.asynccontextmanager
async def raw_server(*writes: bytes, pause_s: float = 0.0) -> AsyncIterator[str]:
    """Answers one request with these bytes and then falls silent; its URL."""
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for data in writes:
                writer.write(data)
                await asyncio.sleep(pause_s)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/events"
        await done.wait()


@pytest.mark.serial
async def test_silence_is_noticed() -> None:
    heard: list[bytes] = []

    def hear(data: bytes) -> float:
        heard.append(data)
        return 0.0

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(KEEP_ALIVE), KEEP_ALIVE)
    async with raw_server(head, *[chunk] * 3, pause_s=0.06) as url:
        began = time.monotonic()
        with pytest.raises(EventStreamBroken, match="nothing came"):
            await read_events(
                url,
                {},
                on_open=lambda: heard.append(b"open"),
                on_data=hear,
                connect_timeout_s=1,
                silence_s=0.1,
            )
    assert heard[0] == b"open"
    assert b"".join(heard[1:]) == KEEP_ALIVE * 3
    assert 0.2 < time.monotonic() - began < 1


async def test_what_is_not_http_breaks_the_stream() -> None:
    async with raw_server(b"SSH-2.0-nothing\r\n") as url:
        with pytest.raises(EventStreamBroken, match="not HTTP"):
            await read_events(url, {}, on_open=lambda: None, on_data=lambda _: 0.0, connect_timeout_s=1, silence_s=1)


def test_every_failure_has_an_answer() -> None:
    assert set(ERRORS) == set(FailureCode)
    for code in FailureCode:
        answer = error_for(Failure(code, "message"))
        assert answer.status >= 400
        if code in RETRYABLE:
            assert answer.status in (429, 500, 502, 503)


async def test_an_answer_of_another_version_is_a_failure(relay: Relay, worker: ScriptedWorker) -> None:
    for worker.reply in (b'{"unknown": 1}', b"no", b"", b'{"kind":"\xff"}'):
        with pytest.raises(CallFailed) as caught:
            await relay.ask(worker.at, "GET", "/v1/props", None, decode_props)
        assert caught.value.failure.code is FailureCode.INTERNAL
        assert "version" in caught.value.failure.message


async def test_a_long_answer_is_put_together_on_a_thread(relay: Relay, worker: ScriptedWorker) -> None:
    """The text of 8 MiB of tokens took the event loop 25 ms."""
    for num_bytes, is_inline in ((200_000, True), (400_000, False)):
        worker.reply = b"x" * num_bytes
        thread, reply = await relay.ask(
            worker.at, "POST", TOKENIZE_PATH, Tokenize(content="a"), lambda reply: (threading.current_thread(), reply)
        )
        assert (thread is threading.main_thread()) == is_inline
        assert reply == worker.reply


async def test_a_refusal_that_is_no_text_is_a_failure(relay: Relay, worker: ScriptedWorker) -> None:
    worker.acceptance = b'{"boot":"\xff"}'
    async with call(relay, worker) as (_, mailbox):
        assert (await failure_of(mailbox)).code is FailureCode.INTERNAL


async def test_a_worker_is_told_whose_a_question_is_before_its_body(relay: Relay, worker: ScriptedWorker) -> None:
    worker.reply = b'{"num_tokens":1}'
    for team in ("red", "r\u00f6t, \u4f60\r\n", ""):
        asked = Render(request=REQUEST, tenant=team)
        assert (await relay.ask(worker.at, "POST", RENDER_PATH, asked, decode_rendered)).num_tokens == 1
    assert worker.teams == ["red", "r%C3%B6t%2C%20%E4%BD%A0%0D%0A", None]


async def test_many_vectors_are_decoded_as_they_come(
    relay: Relay, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call 32 MiB held the event loop for 70 ms."""
    numbers = random.Random(3).randbytes(16 << 20)
    result = PoolResult(pooling="mean", width=4096, rows=(1,) * 1024, num_tokens=(1,) * 1024, vectors=numbers)
    worker.reply = msgspec.json.encode(result)
    decoded, decode = list[int](), msgspec.json.Decoder(bytes).decode

    def counted(text: bytes) -> bytes:
        decoded.append(len(text))
        return decode(text)

    monkeypatch.setattr("workers.protocol.pooled._decode_bytes", counted)
    assert await relay.pool(worker.at, CALL, PoolRequest(inputs=("a",) * 1024)) == result
    assert max(decoded) < 1 << 20
    assert sum(decoded) > 4 * len(numbers) // 3


async def test_vectors_that_take_too_much_end_the_call_while_they_come(relay: Relay, worker: ScriptedWorker) -> None:
    numbers = random.Random(3).randbytes(16 << 20)
    result = PoolResult(pooling="mean", width=4096, rows=(1,) * 1024, num_tokens=(1,) * 1024, vectors=numbers)
    worker.reply = msgspec.json.encode(result)
    counts = list[int]()

    def hold(num_bytes: int) -> None:
        counts.append(num_bytes)
        if num_bytes > 1 << 20:
            raise MemoryFull("no more")

    with pytest.raises(MemoryFull):
        await relay.pool(worker.at, CALL, PoolRequest(inputs=("a",) * 1024), hold=hold)
    assert max(counts) < 2 << 20
    worker.reply = msgspec.json.encode(msgspec.structs.replace(result, vectors=b"1234"))
    small = await relay.pool(worker.at, CALL, PoolRequest(inputs=("a",)), hold=hold)
    assert small.vectors == b"1234", "the next question gets its own answer"


@pytest.mark.parametrize("reply", [b"", b"no", b'{"vectors":"AAAA"}', b'{"vectors":"!!!!"}'])
async def test_vectors_of_another_version_are_a_failure(relay: Relay, worker: ScriptedWorker, reply: bytes) -> None:
    worker.reply = reply
    with pytest.raises(CallFailed, match="Run the same version"):
        await relay.pool(worker.at, CALL, PoolRequest(inputs=("a",)))


async def test_an_acceptance_of_another_version_ends_its_call_alone(relay: Relay, worker: ScriptedWorker) -> None:
    async with call(relay, worker) as (number, mailbox):
        worker.acceptance = b'{"unknown": 1}'
        async with call(relay, worker) as (_, other):
            assert (await failure_of(other)).code is FailureCode.INTERNAL
        await worker.say([Started(number, 0, 3, 0), end(number)])
        assert isinstance((await drained(mailbox))[-1], Finished)
