"""Answers `POST /v1/responses` and `POST /v1/responses/input_tokens`; drops old turns of conversations that exceed the
context."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from msgspec.structs import replace as replace_struct
from starlette.types import Receive, Scope, Send

from gateway.api.call_handlers import CallHandlers
from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.disconnect import until_disconnect
from gateway.api.intake.intake import Body
from gateway.api.media.loader import MediaLoader
from gateway.api.request_headers import conversation_key, read_autoload, read_resume_options, read_ttft_deadline
from gateway.api.responder import Responder
from gateway.api.responses.background import Background
from gateway.api.responses.request import Draft, ResponseRequest, read_draft
from gateway.api.responses.response_store import ResponseStore
from gateway.api.shapes import INPUT_TOKENS
from gateway.call import Call, Principal
from gateway.dispatch.call_resolver import CallResolver
from gateway.dispatch.request_size import chars_of_message, media_chars
from gateway.relay.relay import WorkerQueries
from gateway.telemetry.request_log import RequestLog
from workers.protocol.requests import GenerateRequest, Medium, Message

ANSWER_SHARE = 8
"""If a request has no `max_output_tokens`, an eighth of the context is kept free for the answer."""
STANDING = ("system", "developer")

MAX_RENDERS = 6
"""Maximum renderings of one conversation to find how much of it fits the context; three nearly always suffice."""


async def turns_to_drop(sizes: Sequence[int], room: int, count: Callable[[int], Awaitable[int]]) -> int:
    """Return how many of the first turns must be dropped so that the rest has at most `room` tokens. The last turn
    always stays, even if it does not fit.

    `sizes`: characters of each turn. `count(n)` renders the conversation without its first n turns and returns the
    tokens. It is called at most `MAX_RENDERS` times, each with an n estimated from the characters. If these calls do
    not find the smallest n that fits, a larger one is returned."""
    tokens, last = await count(0), 0
    fewest, most = 1, len(sizes) - 1
    if tokens <= room or most < 1:
        return 0 if tokens <= room else max(most, 0)
    dropped = list(itertools.accumulate(sizes, initial=0))
    rate = tokens / max(1, dropped[-1])
    for _ in range(MAX_RENDERS - 1):
        if fewest >= most:
            break
        wanted = dropped[last] + (tokens - room) / rate
        guess = min(max(bisect.bisect_left(dropped, wanted), fewest), most - 1)
        found = await count(guess)
        if tokens != found and guess != last:
            rate = abs((tokens - found) / (dropped[guess] - dropped[last]))
        tokens, last = found, guess
        if found <= room:
            most = guess
        else:
            fewest = guess + 1
    return most


def turns_of(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the turns of a conversation, without system messages.

    Each begins with a user's message, so that the results of tools stay with the calls that they answer."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role in STANDING:
            continue
        if not turns or message.role == "user":
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def without(request: GenerateRequest, turns: Sequence[tuple[Message, ...]], number: int) -> GenerateRequest:
    """Return the request without its first `number` turns, and without their media."""
    dropped = {id(message) for turn in turns[:number] for message in turn}
    media = iter(request.media)
    kept: list[Message] = []
    kept_media: list[Medium] = []
    for message in request.messages:
        own = list(islice(media, len(message.media)))
        if id(message) not in dropped:
            kept.append(message)
            kept_media += own
    return replace_struct(request, messages=tuple(kept), media=tuple(kept_media))


class Preparation:
    """Completes a request with the conversation before it, and makes the `Call` that the gateway runs."""

    def __init__(self, resolver: CallResolver, queries: WorkerQueries, media: MediaLoader) -> None:
        self._resolver = resolver
        self._queries = queries
        self._media = media

    async def prepare(
        self,
        draft: Draft,
        responses: ResponseStore,
        body: Body,
        principal: Principal,
        request_log: RequestLog,
        scope: Scope,
    ) -> tuple[ResponseRequest, Call]:
        """Return the request with the conversation before it, and its call. Raises PaddockError."""
        asked = await responses.complete(draft, body)
        del draft  # the steps below may wait for long
        conversation = conversation_key(scope, asked.requests[0], principal.team)
        call = self._resolver.resolve(
            principal,
            asked.model,
            request_log,
            "chat",
            read_ttft_deadline(scope),
            conversation,
            adapters=asked.requests[0].adapters,
            held_bytes=body.num_bytes,
            autoload=read_autoload(scope),
        )
        asked, call = await self._media.prepare(asked, call, body.hold, None)
        if asked.fit:
            asked = await self._truncate(asked, call.model, principal.team)
        return asked, call

    async def _truncate(self, asked: ResponseRequest, model: str, team: str) -> ResponseRequest:
        """Drop the oldest turns of a request until the rest fits the context, and return the shortened request.

        System messages and the last turn stay; if they are too long, the worker refuses them. A worker renders the rest
        and counts its tokens. Raises PaddockError."""
        request = asked.requests[0]
        room = self._room(model, request)
        if room is None:
            return asked
        turns = turns_of(request.messages)

        async def count(number: int) -> int:
            return await self._queries.num_tokens(model, without(request, turns, number), team)

        facts = next(iter(self._queries.workers(model))).facts
        sizes = [sum(chars_of_message(one) + media_chars(one, facts) for one in turn) for turn in turns]
        number = await turns_to_drop(sizes, room, count)
        return replace(asked, requests=(without(request, turns, number),)) if number else asked

    def _room(self, model: str, request: GenerateRequest) -> int | None:
        """Return the maximum number of tokens for the prompt; None: no worker has reported its context."""
        n_ctx = min((beat.n_ctx for beat in self._queries.workers(model)), default=0)
        if not n_ctx:
            return None
        wanted = n_ctx // ANSWER_SHARE if request.max_tokens is None else request.max_tokens
        return n_ctx - min(max(1, wanted), n_ctx // 2)


class CreateRoutes:
    """Answers `POST /v1/responses` and `POST /v1/responses/input_tokens`."""

    def __init__(
        self,
        calls: CallHandlers,
        responses: ResponseStore,
        responder: Responder[ResponseRequest],
        background: Background,
        preparation: Preparation,
    ) -> None:
        self._calls = calls
        self._responses = responses
        self._responder = responder
        self._background = background
        self._preparation = preparation

    async def create(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log = request_log_of(scope)
        async with self._calls.intake.open_body(principal, scope, receive, takes_media=True) as body:
            resume = await read_resume_options(scope, body)
            if resume is not None and resume.stream:
                await self._calls.resumable.again(resume, body, scope, receive, send)
                return
            async with until_disconnect(receive):
                self._calls.resolver.begin(principal, request_log, "chat")
                # The draft gets no name here, since it would stay in memory, beside `asked`, until the answer ends.
                asked, call = await self._preparation.prepare(
                    await body.decode(partial(read_draft, ignored=request_log.ignored, attachments=body.attachments)),
                    self._responses,
                    body,
                    principal,
                    request_log,
                    scope,
                )
            if asked.background:
                await self._background.begin(asked, call, resume, scope, receive, send)
            else:
                await self._responder.answer(asked, call, resume, scope, receive, send)

    async def count_tokens(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        calls, request_log = self._calls, request_log_of(scope)
        async with calls.intake.open_body(principal, scope, receive, takes_media=True) as body:
            read = partial(read_draft, ignored=request_log.ignored, attachments=body.attachments)
            calls.resolver.begin(principal, request_log)
            draft = await body.decode(read)
            asked = await self._responses.complete(draft, body)
            call = calls.resolver.resolve(principal, asked.model, request_log)
            asked, call = await calls.media.prepare(asked, call, body.hold, receive)
            async with until_disconnect(receive):
                num_tokens = await calls.queries.num_tokens(call.model, asked.requests[0], principal.team)
        await send_json(send, {**INPUT_TOKENS, "input_tokens": num_tokens}, request_log)
