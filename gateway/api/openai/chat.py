"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.body import read_body
from gateway.api.diagnostics import answer_headers, trail_of
from gateway.api.errors import error_body, note_error, send_error
from gateway.api.openai.chat_answer import ChunkWriter, WholeWriter
from gateway.api.openai.chat_request import ChatRequest, read_chat
from gateway.api.presence import while_present
from gateway.api.streaming import DONE, EventStream, data
from gateway.call import Call
from gateway.errors import PaddockError
from gateway.pipeline import Pipeline
from gateway.telemetry.trail import Trail

LAST_WORD_S = 2.0
"""How long a client that is cut off gets to take in why."""


class ChatCompletions:
    """The ASGI app of the route."""

    def __init__(self, keys: Keys, pipeline: Pipeline, max_body_bytes: int, ping_interval_s: float) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        principal = self._keys.authenticate(scope["headers"])
        trail.team, trail.key_id = principal.team, principal.key_id
        asked = read_chat(await read_body(scope, receive, self._max_body_bytes))
        call = self._pipeline.call(principal, asked.model, trail)
        async with while_present(receive):
            if asked.stream:
                await self._stream(asked, call, trail, receive, send)
            else:
                await self._whole(asked, call, trail, send)

    async def _whole(self, asked: ChatRequest, call: Call, trail: Trail, send: Send) -> None:
        request = asked.request
        writer = WholeWriter(call.alias, trail, n_probs=request.n_probs, post_sampling=request.post_sampling_probs)
        async with self._pipeline.answer(call, request, trail) as answer:
            while not answer.ended:
                writer.add(await answer.take())
        body = writer.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        trail.status, trail.outcome = 200, "ok"
        await send({"type": "http.response.start", "status": 200, "headers": headers + answer_headers(trail)})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, asked: ChatRequest, call: Call, trail: Trail, receive: Receive, send: Send) -> None:
        stream = EventStream(send, lambda: answer_headers(trail))
        async with asyncio.TaskGroup() as tasks:
            pings = tasks.create_task(stream.ping_every(self._ping_interval_s))
            # In a task of its own, a token's wake-up does not climb through every frame of the way in.
            failure = await tasks.create_task(self._write(asked, call, trail, stream))
            pings.cancel()
        # Whatever is sent below is the last: the server then tells the watcher that the client is gone.
        if failure is None:
            trail.status, trail.outcome = 200, "ok"
            await stream.end(DONE)
        elif stream.started:
            trail.status = 200
            note_error(trail, failure)
            await _last_word(stream, data(error_body(failure)) + DONE)
        else:
            await send_error(receive, send, failure, trail)

    async def _write(self, asked: ChatRequest, call: Call, trail: Trail, stream: EventStream) -> PaddockError | None:
        """Everything but the last word, which depends on what is returned: why the answer is not complete."""
        post_sampling = asked.request.post_sampling_probs
        writer = ChunkWriter(call.alias, asked.include_usage, trail, post_sampling=post_sampling)
        chunks, write = writer.chunks, stream.write
        try:
            async with self._pipeline.answer(call, asked.request, trail) as answer:
                await stream.start()
                await write(writer.opening())
                while not answer.ended:
                    body = chunks(await answer.take())
                    if body:
                        await write(body)
        except PaddockError as error:
            return error
        return writer.failure


async def _last_word(stream: EventStream, body: bytes) -> None:
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await stream.end(body)
    except TimeoutError:
        # The client does not read: leaving the response unfinished makes the server close the connection.
        return
