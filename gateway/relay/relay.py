"""Holds all event streams of this gateway process, and sends calls and questions to workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from gateway.errors import Stopping
from gateway.relay.fanin import CONNECT_TIMEOUT_S, Credentials, Place, WorkerStream
from gateway.relay.mailbox import Mailbox, MailboxWithSettings
from gateway.relay.worker_asks import AtOnce, NotReached, Reading, ReplyT, ask
from gateway.relay.worker_client import Cancellations, WorkerClient
from workers.dead_peers import watched_socket
from workers.protocol.events import Failed, Finished, Settings
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import PROTOCOL_VERSION, Heartbeat
from workers.protocol.pooled import POOL_PATH, PoolRequest, PoolResult, ResultReader
from workers.protocol.requests import GenerateRequest, Submit
from workers.tracing.context import TraceContext

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 2 * CONNECT_TIMEOUT_S
"""Seconds that a call waits for the event stream of a worker that was seen only now."""
ASK_TIMEOUT_S = 60.0
HEARD_OF_S = 1.0
"""Seconds that a call waits for the record of a worker process that it has a slot of before the record was read."""


@dataclass(slots=True)
class Line:
    """The connection to one worker process: its event stream and its client."""

    stream: WorkerStream
    headers: Mapping[str, str]
    """Headers of every request to it."""
    client: WorkerClient
    cancellations: Cancellations
    group: asyncio.TaskGroup


class Relay:
    """Follows the fleet with one stream per worker process, and submits calls to workers (`passage`).

    `run` must be running while passages are open; everything happens on its event loop.
    """

    def __init__(self, gateway_id: str, secret: str, buffer_events: int) -> None:
        self._gateway_id = gateway_id
        self._secret = secret
        self._buffer_events = buffer_events
        self._numbers = itertools.count(1)
        self._lines: dict[str, Line] = {}
        self._lost: set[str] = set()
        """Boot ids of processes that are gone though the fleet may still show them."""
        self._places: dict[str, Place] = {}
        """Boot id -> address, of the fleet as last seen. Calls go to no other address than these, which are sealed."""
        self._told = asyncio.Event()
        """Set, and replaced by a new one, when the fleet has changed."""
        self._group: asyncio.TaskGroup | None = None
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Hold the streams until cancelled. Calls still under way end with their worker's grace period."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, socket_factory=watched_socket)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    self._session, self._group = session, group
                    for place in self._places.values():
                        self._open_line(place)
                    await asyncio.get_running_loop().create_future()
            finally:
                self._session = self._group = None
                self._lines.clear()

    def follow(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Take in the fleet as it is now: open streams to new processes, and note which are gone. Never waits."""
        self._places = {
            beat.boot: Place(beat.worker, beat.boot, beat.address.rstrip("/"), beat.model)
            for beat in heartbeats
            if beat.protocol == PROTOCOL_VERSION
        }
        self._told.set()
        self._told = asyncio.Event()
        if self._group is None:
            return
        successors = {place.worker: boot for boot, place in self._places.items()}
        for boot, line in list(self._lines.items()):
            if boot in self._places:
                line.stream.stay()
            else:
                line.stream.depart()
                if successors.get(line.stream.place.worker, boot) != boot:
                    line.stream.lose("was restarted")
        for place in self._places.values():
            self._open_line(place)

    @asynccontextmanager
    async def passage(
        self,
        place: Place,
        request: GenerateRequest,
        tenant: str,
        request_id: str,
        on_overflow: Callable[[], None],
        begin_by: float = 0.0,
        context: TraceContext | None = None,
        on_end: Callable[[Finished | Failed], None] = lambda end: None,
        weight: float = 1.0,
        known_bytes: int = 0,
    ) -> AsyncIterator[Mailbox]:
        """Submit a call; leaving the block before its end cancels it on the worker, without waiting.

        `on_end` is called with the answer's last event when it comes, which may be long before the caller takes it.
        `weight`: of the tenant, where calls of several share the worker's slots. `known_bytes`: size of the
        conversation, where it has been counted.
        Raises CallFailed when the worker cannot be asked; a worker that refuses the call does so in a `Failed` event.
        """
        line = await self._line_to(place)
        number = next(self._numbers)
        box = MailboxWithSettings if "settings" in request.tell else Mailbox
        mailbox = box(self._buffer_events, on_overflow, on_end)
        submit = Submit(
            gateway=self._gateway_id,
            call=number,
            request=request,
            tenant=tenant,
            weight=weight,
            request_id=request_id,
            deadline=begin_by,
            traceparent="" if context is None else context.traceparent,
            tracestate="" if context is None else context.state,
        )
        line.stream.attach(number, mailbox)
        # The answer may overtake the 202, and the worker may die before it: one mailbox takes whatever comes first.
        submitting = line.group.create_task(self._submit(line, submit, mailbox, known_bytes))
        try:
            yield mailbox
        finally:
            line.stream.detach(number)
            submitting.cancel()
            if not mailbox.ended:
                line.cancellations.add([number])

    async def ask(
        self,
        place: Place,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        decode: Callable[[bytes], ReplyT],
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> ReplyT:
        """Send one question to one worker and return the answer. Raises CallFailed, Stopping."""
        return await self._ask(place, method, path, message, AtOnce(decode), timeout_s)

    async def pool(self, place: Place, request: PoolRequest, timeout_s: float) -> PoolResult:
        """Have one worker compute embeddings or ranks, and return them. Raises CallFailed, Stopping."""
        return await self._ask(place, "POST", POOL_PATH, request, ResultReader(), timeout_s)

    async def _ask(
        self,
        place: Place,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        reading: Reading[ReplyT],
        timeout_s: float,
    ) -> ReplyT:
        # Questions have prompts in them, too: none is sent before the worker has shown that it knows the secret.
        line = await self._line_to(place)
        if self._session is None:
            raise _stopping()
        payloads, told = line.client.payloads, line.stream.place
        return await ask(self._session, payloads, line.headers, told, method, path, message, reading, timeout_s)

    def is_lost(self, boot: str) -> bool:
        """Return whether the process is known to be gone though the fleet may still show it."""
        return boot in self._lost

    @property
    def any_lost(self) -> bool:
        return bool(self._lost)

    async def _line_to(self, place: Place) -> Line:
        """Return the connection to a process with a sealed record, its stream open. Raises CallFailed, Stopping."""
        if place.boot not in self._lines and place.boot not in self._places:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARD_OF_S):
                    while place.boot not in self._places:
                        await self._told.wait()
        known = self._places.get(place.boot)
        line = self._lines.get(place.boot) if known is None else self._open_line(known)
        # A lease is only as true as Redis: it may be of another model's worker, or have another's address.
        told = None if line is None else line.stream.place
        if told is not None and (told.worker, told.model) != (place.worker, place.model):
            line = None
        if line is None or line.stream.lost or not await line.stream.settled(SETTLE_TIMEOUT_S):
            message = f"The worker {place.worker} cannot be reached. Send the request again."
            raise NotReached(Failure(FailureCode.WORKER_LOST, message))
        return line

    def _open_line(self, place: Place) -> Line:
        line = self._lines.get(place.boot)
        if line is not None:
            return line
        if self._group is None or self._session is None:
            raise _stopping()
        credentials = Credentials(self._secret, place.worker, place.boot)
        client = WorkerClient(self._session, credentials.headers, self._gateway_id)
        cancellations = Cancellations(client, place, self._group)
        stream = WorkerStream(place, self._gateway_id, credentials, cancellations.add, self._lost)
        line = self._lines[place.boot] = Line(stream, credentials.headers, client, cancellations, self._group)
        self._group.create_task(self._hold(stream))
        return line

    async def _submit(self, line: Line, submit: Submit, mailbox: Mailbox, known_bytes: int) -> None:
        try:
            accepted = await line.client.submit(line.stream.place, submit, known_bytes)
            if isinstance(mailbox, MailboxWithSettings):
                ran_with = accepted.sampling
                mailbox.tell(None if ran_with is None else Settings(submit.call, accepted.prompt, ran_with))
        except CallFailed as failed:
            mailbox.put(Failed(submit.call, failed.failure))
            if failed.failure.code is FailureCode.WORKER_LOST:
                line.cancellations.add([submit.call])  # it may have arrived all the same

    async def _hold(self, stream: WorkerStream) -> None:
        try:
            await stream.run()
        except Exception:  # one worker's stream must not end the others; its own calls are ended here
            log.exception("event stream crashed", extra={"fields": {"worker": stream.place.worker}})
            stream.lose("broke its event stream")
        finally:
            self._lines.pop(stream.place.boot, None)
            self._lost.discard(stream.place.boot)


def _stopping() -> Stopping:
    return Stopping("This gateway is stopping. Send the request again.")
