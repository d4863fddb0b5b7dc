"""Runs responses in the background: the caller gets a response with status `queued` at once, and the response is
finished even if nobody reads it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.intake import Body, hold_function, keep_held
from gateway.api.intake.memory_budget import Holds
from gateway.api.request_headers import ResumeOptions
from gateway.api.responder import Responder
from gateway.api.responses.events import EventWriter
from gateway.api.responses.items import stream_of
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.response_store import ResponseStore
from gateway.api.resumable import Resumable
from gateway.call import Call
from gateway.errors import StorageFull, StoreUnavailable, TooManyStreams, Unavailable
from gateway.resume.reading import LocalReading
from gateway.resume.recording import Recording
from gateway.resume.recordings import Owner, Recordings
from gateway.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

RUNNING = ("queued", "in_progress")
LOOK_EVERY_S = 0.05
CANCEL_S = 4.0
"""Maximum seconds that `cancel` waits for the gateway that runs the response to end it; then it raises Unavailable."""


class Background:
    def __init__(
        self,
        responder: Responder[ResponseRequest],
        recordings: Recordings,
        resumable: Resumable,
        responses: ResponseStore,
    ) -> None:
        self._responder = responder
        self._recordings = recordings
        self._resumable = resumable
        self._responses = responses

    async def begin(
        self,
        asked: ResponseRequest,
        call: Call,
        resume: ResumeOptions | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Start a response. Send it as queued or, if the caller streams, its events as they come.

        Raises StoreUnavailable, StorageFull, TooManyStreams, RateLimited."""
        call = replace(call, unhurried=True, queue_deadline=call.deadline, start_deadline=call.deadline)
        request_log = request_log_of(scope)
        call, end = await self._responder.permit_ahead(asked, call, request_log)
        writer = EventWriter(asked, call)
        queued = writer.snapshot.object("queued")
        try:
            reading = await self._start(asked, call, end, writer, resume, scope)
        except BaseException:
            end()
            raise
        if asked.stream:
            await self._resumable.follow(reading, scope, receive, send)
        else:
            request_log.handed_over = True
            reading.close()
            await send_json(send, queued, request_log)

    async def _start(
        self,
        asked: ResponseRequest,
        call: Call,
        end: Callable[[], None],
        writer: EventWriter,
        resume: ResumeOptions | None,
        scope: Scope,
    ) -> LocalReading:
        """Store the response as queued, and begin to make it. `end` is called when it is over."""
        request_log, team, holds = request_log_of(scope), call.principal.team, hold_function(scope)
        if not await self._responses.keep(team, writer.record(writer.snapshot.object("queued"))):
            raise StorageFull(
                "The request takes more bytes than its team's stored responses may in all: see the limit "
                "`stored_response_bytes` of the team or its organisation, else the setting "
                "`responses_bytes_per_team`. Send less, or send it without `background`."
            )

        async def produce(recording: Recording) -> None:
            try:
                await self._produce(asked, call, request_log, writer, holds, recording)
            finally:
                end()

        owner = Owner(team, "") if resume is None else resume.owner
        try:
            return await self._resumable.begin(stream_of(asked.id), owner, None, keep_held(scope, produce), request_log)
        except TooManyStreams:
            await self._responses.drop(team, asked.id)
            raise

    async def cancel(self, id_: str, body: Body) -> dict[str, Any]:
        """Cancel a response and return it; one that had already ended stays as it is.

        Raises ResponseNotFound, and Unavailable if it still runs after CANCEL_S."""
        response = await self.current(id_, body)
        if response["status"] not in RUNNING:
            return response
        await self._recordings.stop(stream_of(id_))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                # A response is as large as its request, so the loop does not read it again and again.
                while not await self._recordings.is_over(stream_of(id_)):  # noqa: ASYNC110 - it is in Redis
                    await asyncio.sleep(LOOK_EVERY_S)
        response = await self.current(id_, body)
        if response["status"] in RUNNING:
            raise Unavailable("The response is not cancelled yet. Ask again.")
        return response

    async def drop(self, id_: str, body: Body) -> None:
        """Delete a response, and stop it if it still runs. Raises ResponseNotFound."""
        record = await self._responses.get(id_, body)
        await self._responses.drop(body.team, id_)
        if record.response["status"] in RUNNING:
            await self._recordings.stop(stream_of(id_))

    async def current(self, id_: str, body: Body) -> dict[str, Any]:
        """Return a stored response in its present state: failed if the gateway that ran it is gone.

        Raises ResponseNotFound."""
        record = await self._responses.get(id_, body)
        if record.response["status"] in RUNNING and not await self._recordings.alive(stream_of(id_)):
            # It may have ended in between. Then the record that is stored by now says so.
            record = await self._responses.get(id_, body)
            if record.response["status"] in RUNNING:
                lost = {"code": "server_error", "message": "The gateway that made this response is gone. Ask anew."}
                return {**record.response, "status": "failed", "error": lost}
        return record.response

    async def _produce(
        self,
        asked: ResponseRequest,
        call: Call,
        request_log: RequestLog,
        writer: EventWriter,
        holds: Holds,
        recording: Recording,
    ) -> None:
        team = call.principal.team

        async def note_begun() -> None:
            try:
                await self._responses.keep(team, writer.record(writer.snapshot.object("in_progress")), again=True)
            except StoreUnavailable as error:
                log.warning("response %s is shown as queued while it runs: %s", asked.id, error)

        recording.on_start = note_begun
        recording.write(writer.queued())
        try:
            await self._responder.record(asked, call, request_log, writer, holds, recording)
        except asyncio.CancelledError:
            request_log.status, request_log.outcome = 200, "cancelled"
            await self._responses.keep(team, writer.record(writer.stopped()), again=True)
            raise
