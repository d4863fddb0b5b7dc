"""Serves `/v1/responses` over WebSocket: accepts a connection, answers its requests, and closes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from time import monotonic

from starlette.types import Receive, Scope, Send

from gateway.access.control import AccessControl
from gateway.api.call_handlers import CallHandlers
from gateway.api.dialect import StreamWriter, WholeWriter
from gateway.api.http.answers import note_error, shape_of
from gateway.api.http.diagnostics import answer_headers, origin_of, request_log_of
from gateway.api.http.sockets import METHOD, NORMAL, RESTARTS, SWITCHED, Socket, Sockets
from gateway.api.intake.disconnect import CLIENT_GONE_STATUS, ClientGone
from gateway.api.intake.intake import Body
from gateway.api.request_headers import read_ttft_deadline
from gateway.api.responder import LAST_WRITE_S, Responder
from gateway.api.responses.create import Preparation
from gateway.api.responses.events import EventWriter
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.response_store import CHAIN_FACTOR, RecordStore, ResponseStore, ResponseWriters
from gateway.api.responses.socket.memory import Memories, Memory
from gateway.api.responses.socket.stream_queues import (
    Create,
    EventMessages,
    StreamQueues,
    draft_of_message,
    error_text,
    raw_message,
    read_message,
)
from gateway.back_pressure import stopping
from gateway.call import Principal
from gateway.errors import ConnectionLimit, InternalError, PaddockError
from gateway.telemetry.finish import finish_request
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

CLOSING_S = 60.0
"""Seconds that a client has to receive the last event of a complete response, which repeats the whole response."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one connection."""

    max_bytes: int
    """Maximum bytes of the connection's unanswered requests and, counted separately, of the responses it remembers."""
    idle_s: float
    """Seconds for which the connection stays open without a request under way."""
    life_s: float
    """Seconds after which the connection takes no more requests; those that run then are still answered."""


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The objects that all WebSocket connections of the gateway use, such as its handlers and its access control."""

    calls: CallHandlers
    access: AccessControl
    preparation: Preparation
    store: RecordStore
    memories: Memories
    metrics: Metrics
    bounds: Bounds


class Connection:
    def __init__(self, shared: SharedParts, socket: Socket, scope: Scope, request_id: str) -> None:
        self._shared, calls = shared, shared.calls
        self._socket = socket
        self._scope = scope
        self._request_id = request_id
        self._memory = Memory(shared.store, shared.memories, shared.bounds.max_bytes)
        self._responses = ResponseStore(self._memory, CHAIN_FACTOR * calls.intake.max_body_bytes)
        self._responder: Responder[ResponseRequest] = Responder(
            ResponseWriters(),
            calls.pipeline,
            calls.pings,
            calls.resumable,
            partial(_conclude, self._responses, self._memory),
            repeats=True,
        )
        self._queues: StreamQueues[Body] | None = None
        self._ends_at = monotonic() + shared.bounds.life_s
        self._num_requests = 0
        self._stopping = False
        self._gone = False
        """Whether the client has gone."""
        self._was_long = False
        """Whether the timer was last set to the end of the connection's life (`life_s`), not of its idle time."""
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Answer requests until the client leaves or this side ends the connection, but only between responses."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._queues = StreamQueues(tasks, self._respond, self._rest, self._shared.bounds.max_bytes)
                reading = tasks.create_task(self._read(self._queues))
                self._rest()
                await self._over.wait()
                reading.cancel()
                if self._gone:
                    await self._queues.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            # The queues refer to the connection: a cycle. Cycles are freed late, and hundreds hold up the event loop.
            self._queues = None
            self._memory.close()
        if not self._gone:
            await self._close_socket()

    def stop(self) -> None:
        self._stopping = True
        self._rest()

    async def _read(self, queues: StreamQueues[Body]) -> None:
        try:
            while True:
                await self._take(await self._socket.receive(), queues)
        except ClientGone:
            self._leave()

    async def _take(self, text: str | bytes | None, queues: StreamQueues[Body]) -> None:
        stream_id, body, is_taken = "", None, False
        try:
            # A key may have been withdrawn since the handshake.
            principal = self._shared.access.authenticate(self._scope)
            try:
                body = self._shared.calls.intake.message(principal, raw_message(text))
            finally:
                del text  # a long message is held once, and counted
                await self._shared.access.starts.start(principal.team)  # to be refused takes its turn as well
            message = await body.decode(read_message)
            stream_id = message.stream_id
            if monotonic() >= self._ends_at:
                raise self._limit()
            queues.add(message, body)
            is_taken = True
        except PaddockError as error:
            request_log = self._new_request_log()
            try:
                await self._refuse(error, request_log, stream_id)
            finally:
                finish_request(request_log, self._shared.metrics)
        finally:
            # The client may leave while the message is decoded.
            if body is not None and not is_taken:
                body.close()
        self._rest()

    async def _respond(self, message: Create, body: Body) -> None:
        request_log = self._new_request_log()
        try:
            await self._answer(message, body, request_log)
        except PaddockError as error:
            await self._refuse(error, request_log, message.stream_id)
        except ClientGone:
            _note_gone(request_log)
            self._leave()
        except asyncio.CancelledError:
            _note_gone(request_log)
            raise
        except Exception:
            log.exception("request failed", extra={"fields": request_log.ids()})
            broken = InternalError.logged(request_log.request_id)
            await self._refuse(broken, request_log, message.stream_id)
        finally:
            finish_request(request_log, self._shared.metrics)

    async def _answer(self, message: Create, body: Body, request_log: RequestLog) -> None:
        """Answer one message. Raises ClientGone, and PaddockError if it fails before any of its events is sent."""
        shared = self._shared
        # A key may have been withdrawn since the handshake.
        principal = shared.access.authenticate(self._scope)
        request_log.asked_by(principal)
        shared.calls.resolver.begin(principal, request_log, "chat")
        read = partial(draft_of_message, message, request_log.ignored, body.attachments)
        draft = await body.run_aside(message.num_bytes, read)
        asked, call = await shared.preparation.prepare(
            draft, self._responses, body, principal, request_log, self._scope
        )
        writer, sink = EventWriter(asked, call), EventMessages(self._socket, message.stream_id)
        failure = await self._responder.write(asked, call, request_log, writer, body.hold, sink)
        if failure is None:
            await self._write_last(sink.write(writer.closing()), CLOSING_S)
        elif sink.told:
            request_log.status = 200
            await self._write_last(sink.write(writer.broken(failure)))
        else:
            try:
                raise failure
            finally:
                del failure  # the error refers to this frame, and with it to the request

    async def _refuse(self, error: PaddockError, request_log: RequestLog, stream_id: str) -> None:
        """Send an error and keep the connection open."""
        shape = shape_of(self._scope)
        request_log.status = request_log.status or shape.status(error)
        note_error(request_log, error)
        await self._write_last(self._socket.send(error_text(error, shape, request_log, stream_id)))

    async def _write_last(self, saying: Coroutine[None, None, None], patience_s: float = LAST_WRITE_S) -> None:
        """Send the last message of a response or connection; if sending takes over `patience_s`, end the connection."""
        try:
            async with asyncio.timeout(patience_s):
                await saying
        except (TimeoutError, ClientGone):
            self._leave()

    async def _close_socket(self) -> None:
        if self._stopping:
            await self._write_last(self._socket.close(RESTARTS, "This gateway is stopping. Connect again."))
            return
        if not self._was_long:
            reason = f"There was no request for {self._shared.bounds.idle_s:g} s."
            await self._write_last(self._socket.close(NORMAL, reason))
            return
        told = error_text(self._limit(), shape_of(self._scope), request_log_of(self._scope), "")
        await self._write_last(self._socket.send(told))
        await self._write_last(self._socket.close(NORMAL, "This connection has reached its limit."))

    def _limit(self) -> ConnectionLimit:
        life_s = self._shared.bounds.life_s
        return ConnectionLimit(f"This connection has reached its limit of {life_s:g} s. Open another one.")

    def _leave(self) -> None:
        self._gone = True
        self._over.set()

    def _rest(self) -> None:
        """Start the timer that ends an idle connection, or stop it while requests are under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queues is not None and self._queues.busy:
            return
        if self._stopping:
            self._over.set()
            return
        idle_s, left_s = self._shared.bounds.idle_s, self._ends_at - monotonic()
        self._was_long = left_s <= idle_s
        self._timer = asyncio.get_running_loop().call_later(min(idle_s, left_s), self._over.set)

    def _new_request_log(self) -> RequestLog:
        self._num_requests += 1
        request_id = f"{self._request_id}.{self._num_requests}"
        path, mine = self._scope["path"], request_log_of(self._scope)
        trace, ignored = mine.trace.for_inner_request(), mine.ignored.another()
        origin = origin_of(self._scope)
        return RequestLog(request_id, METHOD, path, route=path, origin=origin, trace=trace, ignored=ignored)


async def _conclude(
    responses: ResponseStore, memory: Memory, writer: StreamWriter | WholeWriter, failure: PaddockError | None
) -> None:
    await responses.conclude(writer, failure)
    if failure is None and isinstance(writer, EventWriter):
        snapshot = writer.snapshot
        is_stored = snapshot.asked.store and snapshot.is_kept
        team = snapshot.call.principal.team
        await memory.note(team, writer.record(writer.response(brief=True)), is_stored=is_stored)


def _note_gone(request_log: RequestLog) -> None:
    request_log.status, request_log.outcome = request_log.status or CLIENT_GONE_STATUS, "client_gone"


class ResponsesSocket:
    """Answers WebSocket handshakes: checks whether the connection may be opened, and runs it."""

    def __init__(self, shared: SharedParts, sockets: Sockets) -> None:
        self._shared = shared
        self._sockets = sockets

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log = request_log_of(scope)
        read_ttft_deadline(scope)
        if self._shared.calls.resolver.stopping:
            raise stopping(" Connect again.")
        self._sockets.check(principal)
        socket = Socket(receive, send)
        connection = Connection(self._shared, socket, scope, request_log.request_id)
        with self._sockets.opened(connection, principal):
            request_log.status = SWITCHED
            await socket.accept(answer_headers(request_log))
            await connection.run()
        request_log.outcome = "ok"
