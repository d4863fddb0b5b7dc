"""Generated text over HTTP, in any dialect: read the request, take it through the corridor, write what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import monotonic
from typing import Generic, Protocol

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import JSON, send_bytes
from gateway.api.body import read_body
from gateway.api.diagnostics import answer_headers, trail_of
from gateway.api.dialect import AskedT, Dialect, StreamWriter
from gateway.api.errors import note_error, send_error, shape_of
from gateway.api.presence import while_present
from gateway.api.slo import read_begin_by
from gateway.api.streaming import EventStream
from gateway.call import Call
from gateway.choices import Choices, choices
from gateway.errors import PaddockError
from gateway.pipeline import Pipeline
from gateway.relay.failures import answer_to
from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Failed, Finished, Reasoning, Text, ToolCallDelta, Usage

LAST_WORD_S = 2.0
"""How long a client that is cut off gets to take in why."""

OUTPUT = (Text, Reasoning, ToolCallDelta)


class Sink(Protocol):
    """Where a streamed answer goes."""

    async def start(self) -> None: ...

    def write(self, body: bytes) -> Awaitable[None]:
        """Whole events. Waits while there is no room."""
        ...


class Generation(Generic[AskedT]):
    """The ASGI app of a route that generates text."""

    def __init__(
        self, dialect: Dialect[AskedT], keys: Keys, pipeline: Pipeline, max_body_bytes: int, ping_interval_s: float
    ) -> None:
        self._dialect = dialect
        self._keys = keys
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        principal = self._keys.authenticate(scope["headers"])
        trail.team, trail.key_id = principal.team, principal.key_id
        asked = self._dialect.read(await read_body(scope, receive, self._max_body_bytes), scope)
        call = self._pipeline.call(principal, asked.model, trail, "generate", read_begin_by(scope))
        async with while_present(receive):
            if asked.stream:
                await self._stream(asked, call, trail, scope, receive, send)
            else:
                await self._whole(asked, call, trail, send)

    async def _whole(self, asked: AskedT, call: Call, trail: Trail, send: Send) -> None:
        writer = self._dialect.whole_writer(asked, call, trail)
        async with choices(self._pipeline, call, asked.requests, trail) as answer:
            while not answer.ended:
                events = await answer.take()
                if trail.first_token_at is None:
                    note_first(trail, events)
                writer.add(events, answer.choice)
                if answer.end is not None:
                    note_end(trail, answer.end)
        await send_bytes(send, writer.body(), JSON, trail)

    async def _stream(
        self, asked: AskedT, call: Call, trail: Trail, scope: Scope, receive: Receive, send: Send
    ) -> None:
        stream = EventStream(send, lambda: answer_headers(trail))
        writer = self._dialect.stream_writer(asked, call, trail)
        async with asyncio.TaskGroup() as tasks:
            pings = tasks.create_task(stream.ping_every(self._ping_interval_s))
            # In a task of its own, a token's wake-up does not climb through every frame of the way in.
            failure = await tasks.create_task(self._write(asked, call, trail, writer, stream))
            pings.cancel()
        # Whatever is sent below is the last: the server then tells the watcher that the client is gone.
        if failure is None:
            trail.status, trail.outcome = 200, "ok"
            await stream.end(writer.closing())
        elif stream.started:
            trail.status = 200
            note_error(trail, failure)
            await _last_word(stream, writer.broken(failure))
        else:
            await send_error(receive, send, failure, trail, shape_of(scope))

    async def _write(
        self, asked: AskedT, call: Call, trail: Trail, writer: StreamWriter, sink: Sink
    ) -> PaddockError | None:
        """Everything but the last word, which depends on what is returned: why the answer is not complete."""
        try:
            async with choices(self._pipeline, call, asked.requests, trail) as answer:
                await sink.start()
                opening = writer.opening()
                if opening:
                    await sink.write(opening)
                await relay(answer, writer, trail, sink)
        except PaddockError as error:
            return error
        return None


async def relay(answer: Choices, writer: StreamWriter, trail: Trail, sink: Sink) -> None:
    """Every event of the answer to where it goes; the body of the loop runs once per token. Raises PaddockError."""
    take, chunks, write = answer.take, writer.chunks, sink.write
    waits = True
    while not answer.ended:
        events = await take()
        if waits:
            waits = not note_first(trail, events)
        body = chunks(events, answer.choice)
        if body:
            await write(body)
        if answer.end is not None:
            note_end(trail, answer.end)


def note_first(trail: Trail, events: list[CallEvent]) -> bool:
    """Whether there is output among the events."""
    if not any(isinstance(event, OUTPUT) for event in events):
        return False
    trail.first_token_at = monotonic()
    return True


def note_end(trail: Trail, end: Finished | Failed) -> None:
    """Raises PaddockError where the answer failed."""
    if isinstance(end, Failed):
        raise answer_to(end.failure)
    before, usage = trail.usage or Usage(0, 0, 0), end.usage
    trail.usage = Usage(
        before.prompt_tokens + usage.prompt_tokens,
        before.completion_tokens + usage.completion_tokens,
        before.cached_tokens + usage.cached_tokens,
    )


async def _last_word(stream: EventStream, body: bytes) -> None:
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await stream.end(body)
    except TimeoutError:
        # The client does not read: leaving the response unfinished makes the server close the connection.
        return
