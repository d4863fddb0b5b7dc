"""Answers parsed requests: takes them through the pipeline, and writes the answers in the request's dialect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol

from starlette.types import Message, Receive, Scope, Send

from gateway.api.dialect import RequestIn, StreamWriter, WholeWriter, Writers
from gateway.api.http.answers import note_error, send_error, send_parts, shape_of
from gateway.api.http.diagnostics import answer_headers, ping, request_log_of
from gateway.api.http.streaming import EventStream, Pings, Written, chunk_writer_of, whole_events, written
from gateway.api.intake.disconnect import ClientGone, until_disconnect
from gateway.api.intake.intake import hold_function, keep_held
from gateway.api.intake.memory_budget import Holds, ProbabilityBudget
from gateway.api.push_relay import hand_on
from gateway.api.request_headers import ResumeOptions
from gateway.api.resumable import Resumable
from gateway.call import Answer, Call, Cutoff
from gateway.dispatch.fan_out import begin_prompts, start_answers
from gateway.dispatch.pipeline import Pipeline
from gateway.dispatch.upstream import error_for
from gateway.errors import InternalError, PaddockError, Superseded
from gateway.resume.recording import Recording
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import NO_USAGE, OUTPUT, CallEvent, Failed, Finished, Started, Usage

NEWER = "A newer request of this session took this one's place. Nothing is to be sent again."


class SessionCalls:
    """Keeps the latest call of each API key and session in this gateway process, and ends it when a newer one comes.

    This is for autocompletion: a newer request makes the older one useless, and ending that frees its slot."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], Cutoff] = {}

    @asynccontextmanager
    async def supersede(self, call: Call) -> AsyncIterator[None]:
        """End the earlier call of this call's session, and run this call in the block; without a session, only run it.
        If a newer call of the session ends this one, the block raises Superseded."""
        if not call.session:
            yield
            return
        name = call.principal.key_id, call.session
        older = self._latest.get(name)
        if older is not None:
            older.cut(Superseded(NEWER))
        # Later than the call's own deadline, which the pipeline inside the block enforces.
        cutoff = self._latest[name] = Cutoff(call.deadline + 1.0, "the time of its call")
        try:
            async with cutoff:
                yield
        finally:
            if self._latest.get(name) is cutoff:
                del self._latest[name]


class PartialUsage:
    """Counts the tokens of a request's answers as they come: an answer that is cut off reports no usage.

    `add` is called once per token, with what came of it."""

    __slots__ = ("_answers", "_begin_prompts", "_generated", "_meter", "_prompts", "_started", "num_generated")

    def __init__(self, request_log: RequestLog, begin_prompts: Sequence[bool] = (True,)) -> None:
        """The logs of the answers tell from now on how many tokens have come of each. `begin_prompts`: for each answer,
        whether it is the first of its prompt, which counts once."""
        self.num_generated = 0
        """Tokens of all answers so far."""
        self._begin_prompts = begin_prompts
        self._meter = request_log.meter
        self._prompts = NO_USAGE
        """Tokens of the prompts of which answers have begun."""
        self._started: dict[int, Started] = {}
        self._generated: dict[int, int] = {}
        """Index of each answer that has not ended -> its tokens so far. `_started` has its `Started` event instead."""
        self._answers = request_log.answers
        for choice, log in enumerate(self._answers):
            log.num_written = partial(self._num_generated, choice)

    def add(self, choice: int, events: Iterable[CallEvent]) -> None:
        for event in events:
            if isinstance(event, OUTPUT):
                self._generated[choice] = self._generated.get(choice, 0) + event.num_tokens
                self.num_generated += event.num_tokens
            elif type(event) is Started:
                self._started[choice] = event
                if self._begin_prompts[choice]:
                    self._prompts += event.usage
                self._meter.note_begun(self._prompts, self._answers[choice])

    def _num_generated(self, choice: int) -> int:
        return self._generated.get(choice, 0)

    def ended(self, choice: int, usage: Usage) -> Usage:
        """Note the exact usage of an answer that has ended, and return what of it counts for the request."""
        self.num_generated += usage.completion_tokens - self._generated.pop(choice, 0)
        self._started.pop(choice, None)
        return usage if self._begin_prompts[choice] else usage.of_answer

    def add_to(self, request_log: RequestLog) -> None:
        """Add to the log the usage of the answers that have not ended, since these were cut off."""
        prompts = (event.usage for choice, event in self._started.items() if self._begin_prompts[choice])
        left = sum(prompts, start=Usage(0, sum(self._generated.values()), 0))
        if left.prompt_tokens or left.completion_tokens:
            request_log.add_usage(left)


LAST_WRITE_S = 2.0
"""Seconds that a client whose stream is cut off has to receive the error."""

log = logging.getLogger(__name__)

Conclude = Callable[[StreamWriter | WholeWriter, PaddockError | None], Awaitable[None]]


class Sink(Protocol):
    """The receiver of a streamed answer."""

    async def start(self) -> None: ...

    def write(self, body: Written) -> Awaitable[None] | None:
        """Write whole events. Return None if they are written; otherwise what to await, which writes them and waits
        while the receiver has no room for more."""
        ...


class RecordingSink:
    """A `Sink` that writes into a recording, which keeps each event in one piece."""

    def __init__(self, recording: Recording) -> None:
        self.start = recording.start
        self._write = recording.write

    def write(self, body: Written) -> Awaitable[None] | None:
        return self._write(body) if isinstance(body, bytes) else self._write_long(body)

    async def _write_long(self, body: Written) -> None:
        for events in whole_events(body):
            self._write(events)
            await asyncio.sleep(0)


class Responder(Generic[RequestIn]):
    """Answers requests of one dialect."""

    def __init__(
        self,
        writers: Writers[RequestIn],
        pipeline: Pipeline,
        pings: Pings,
        resumable: Resumable,
        conclude: Conclude | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        """`conclude(writer, error)` is awaited before the last part of a complete answer is sent (`error` None), and if
        an answer fails in `write`. `repeats`: whether a stream's last event repeats the whole answer."""
        self._writers = writers
        self._pipeline = pipeline
        self._pings = pings
        self._resumable = resumable
        self._conclude = conclude
        self._repeats = repeats
        self._session_calls = SessionCalls()

    async def answer(
        self, asked: RequestIn, call: Call, resume: ResumeOptions | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request_log = request_log_of(scope)
        if asked.stream and resume is not None:
            writer = self._writers.stream_writer(asked, call, request_log)
            produce = keep_held(scope, partial(self.record, asked, call, request_log, writer, hold_function(scope)))
            await self._resumable.first(resume, produce, scope, receive, send)
            return
        async with until_disconnect(receive):
            if asked.stream:
                await self._stream(asked, call, request_log, scope, receive, send)
            else:
                await self._whole(asked, call, request_log, hold_function(scope), send)

    async def permit_ahead(
        self, asked: RequestIn, call: Call, request_log: RequestLog
    ) -> tuple[Call, Callable[[], None]]:
        """As `Pipeline.permit_ahead`."""
        return await self._pipeline.permit_ahead(call, asked.requests, request_log)

    async def record(
        self,
        asked: RequestIn,
        call: Call,
        request_log: RequestLog,
        writer: StreamWriter,
        holds: Holds,
        recording: Recording,
    ) -> None:
        """Write a resumable stream into its recording, whether or not a client reads the stream now."""
        sink = RecordingSink(recording)
        failure = await self.write(asked, call, request_log, writer, holds, sink)
        if failure is None:
            await written(sink.write(writer.closing()))
        elif recording.started:
            request_log.status = 200
            await written(sink.write(writer.broken(failure)))
        else:
            recording.refuse(failure, b"".join(whole_events(writer.broken(failure))))

    async def write(
        self, asked: RequestIn, call: Call, request_log: RequestLog, writer: StreamWriter, holds: Holds, sink: Sink
    ) -> PaddockError | None:
        """Write a stream except its last events, and record its outcome. Return the error that ended it, or None."""
        try:
            failure = await self._write(asked, call, request_log, writer, holds, sink)
        except ClientGone:
            raise
        except Exception:  # others may read this stream: they must get an error too
            log.exception("a stream broke", extra={"fields": request_log.ids()})
            failure = InternalError.logged(request_log.request_id)
        if failure is None:
            request_log.status, request_log.outcome = 200, "ok"
        else:
            note_error(request_log, failure)
        await self._conclude_answer(writer, failure)
        return failure

    async def _whole(self, asked: RequestIn, call: Call, request_log: RequestLog, holds: Holds, send: Send) -> None:
        writer = self._writers.whole_writer(asked, call, request_log)
        held = ProbabilityBudget(asked.requests, holds, streams=False, repeats=self._repeats)
        async with (
            self._session_calls.supersede(call),
            start_answers(self._pipeline, call, asked.requests, request_log) as answer,
        ):
            partial_usage = PartialUsage(request_log, begin_prompts(asked.requests))

            def collect(events: list[CallEvent]) -> None:
                choice = answer.choice
                partial_usage.add(choice, events)
                if request_log.first_token_at is None:
                    note_first_token(request_log, events)
                writer.add(events, choice)
                if held.are_wanted:
                    held.count(choice, events, written=False)

            try:
                await hand_on(answer, collect, partial(note_end, request_log, partial_usage))
            finally:
                partial_usage.add_to(request_log)
        await self._conclude_answer(writer, None)

        async def send_metered(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                request_log.meter.note_written(partial_usage.num_generated)  # only now the caller has the answer
            await send(message)

        await send_parts(send_metered, writer.parts(), writer.content_type, request_log)

    async def _stream(
        self, asked: RequestIn, call: Call, request_log: RequestLog, scope: Scope, receive: Receive, send: Send
    ) -> None:
        writer = self._writers.stream_writer(asked, call, request_log)
        idle_event = writer.idle if self._pings.as_events else partial(ping, request_log)
        stream = EventStream(send, lambda: answer_headers(request_log), idle_event, chunk_writer_of(scope))
        writing = self._write(asked, call, request_log, writer, hold_function(scope), stream)
        failure = await stream.pinged(writing, self._pings.interval_s)
        # What is sent below ends the response; the server then reports a disconnect to `until_disconnect`.
        if failure is None:
            request_log.status, request_log.outcome = 200, "ok"
            await self._conclude_answer(writer, None)
            await stream.end(writer.closing())
        elif stream.started:
            request_log.status = 200
            note_error(request_log, failure)
            await _write_last(stream, writer.broken(failure))
        else:
            await send_error(receive, send, failure, request_log, shape_of(scope))

    async def _write(
        self, asked: RequestIn, call: Call, request_log: RequestLog, writer: StreamWriter, holds: Holds, sink: Sink
    ) -> PaddockError | None:
        """Write a stream except its last events, which depend on how it ends. Return the error that ended it."""
        held = ProbabilityBudget(asked.requests, holds, streams=True, repeats=self._repeats)
        try:
            async with (
                self._session_calls.supersede(call),
                start_answers(self._pipeline, call, asked.requests, request_log) as answer,
            ):
                await sink.start()
                opening = writer.opening()
                if opening:
                    await written(sink.write(opening))
                partial_usage = PartialUsage(request_log, begin_prompts(asked.requests))
                await write_answer(answer, writer, request_log, sink, held, partial_usage)
        except PaddockError as error:
            return error
        return None

    async def _conclude_answer(self, writer: StreamWriter | WholeWriter, failure: PaddockError | None) -> None:
        if self._conclude is not None:
            await self._conclude(writer, failure)


async def write_answer(
    answer: Answer,
    writer: StreamWriter,
    request_log: RequestLog,
    sink: Sink,
    held: ProbabilityBudget,
    partial_usage: PartialUsage,
) -> None:
    """Write every event of the answer. Raises PaddockError."""
    chunks, write, note_written = writer.chunks, sink.write, request_log.meter.note_written
    waits = True

    def write_events(events: list[CallEvent]) -> Coroutine[Any, None, None] | None:
        """Runs once per token, with what came of it."""
        nonlocal waits
        choice = answer.choice
        partial_usage.add(choice, events)
        if waits:
            waits = not note_first_token(request_log, events)
        body = chunks(events, choice)
        if body:
            note_written(partial_usage.num_generated)
            rest = write(body)
            if rest is not None:
                return write_rest(rest, choice, events)
        if held.are_wanted:
            held.count(choice, events, written=bool(body))
        return None

    async def write_rest(rest: Awaitable[None], choice: int, events: list[CallEvent]) -> None:
        await rest
        if held.are_wanted:
            held.count(choice, events, written=True)

    def end(event: Finished | Failed, choice: int) -> None:
        note_end(request_log, partial_usage, event, choice)
        note_written(partial_usage.num_generated)

    try:
        await hand_on(answer, write_events, end)
    finally:
        partial_usage.add_to(request_log)


def note_first_token(request_log: RequestLog, events: list[CallEvent]) -> bool:
    """Record when the first output came, if there is output among the events; return whether there is."""
    if not any(isinstance(event, OUTPUT) for event in events):
        return False
    request_log.first_token_at = monotonic()
    return True


def note_end(request_log: RequestLog, partial_usage: PartialUsage, end: Finished | Failed, choice: int) -> None:
    """Record the end of one answer. Raises PaddockError if the answer failed."""
    if isinstance(end, Failed):
        raise error_for(end.failure)
    request_log.add_usage(partial_usage.ended(choice, end.usage))


async def _write_last(stream: EventStream, body: Written) -> None:
    try:
        async with asyncio.timeout(LAST_WRITE_S):
            await stream.end(body)
    except TimeoutError:
        # The client does not read: leaving the response unfinished makes the server close the connection.
        return
