"""Sends calls to workers (`Relay`, an implementation of `Upstream`) and questions that take no slot (`WorkerQueries`).

The relay keeps one event stream open per worker process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from gateway.back_pressure import no_worker, stopping
from gateway.call import Call, Principal
from gateway.dispatch.upstream import error_for
from gateway.errors import PaddockError
from gateway.registry.snapshot import FleetView
from gateway.relay.mailbox import Held, Mailbox, MailboxWithSettings
from gateway.relay.worker_client import (
    ASK_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    Cancellations,
    Credentials,
    NotReached,
    ReplyT,
    WholeReply,
    WorkerClient,
)
from gateway.relay.worker_stream import DispatchTurns, WorkerStream
from workers.process.resolver import RESOLVER
from workers.process.sockets import watched_socket
from workers.protocol.events import CallFailed, Failed, Failure, FailureCode, Finished, Settings
from workers.protocol.heartbeat import PROTOCOL_VERSION, Heartbeat, WorkerAddress
from workers.protocol.pooled import POOL_PATH, PoolRequest, PoolResult, ResultReader
from workers.protocol.queries import RENDER_PATH, Render, decode_rendered
from workers.protocol.requests import GenerateRequest, Submit
from workers.tracing.span import TraceContext

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 2 * CONNECT_TIMEOUT_S
"""Maximum seconds that a call waits until the event stream of a worker that is new in the fleet is open."""
RECORD_TIMEOUT_S = 1.0
"""Maximum seconds that a call with a slot waits for this gateway to read the heartbeat of the slot's worker."""


@dataclass(slots=True)
class WorkerConnection:
    """The connection to one worker process: its event stream and its client."""

    stream: WorkerStream
    client: WorkerClient
    cancellations: Cancellations
    group: asyncio.TaskGroup


class Relay:
    """Keeps one event stream open per worker process of the fleet, and has workers compute calls (`start`, `pool`).

    `run` must be running while calls are open. All methods must be called on its event loop."""

    def __init__(
        self,
        gateway_id: str,
        secret: str,
        buffer_events: int,
        reserve: Callable[[Principal], Held] | None = None,
    ) -> None:
        """`reserve` returns what counts the unread events of one of a caller's calls; None: nothing counts them.
        `buffer_events`: maximum number of a call's unread events."""
        self._reserve = reserve
        self._gateway_id = gateway_id
        self._secret = secret
        self._buffer_events = buffer_events
        self._turns = DispatchTurns()
        self._numbers = itertools.count(1)
        self._connections: dict[str, WorkerConnection] = {}
        """Boot id -> connection."""
        self._lost: set[str] = set()
        """Boot ids of processes that are gone, although the fleet may still list them."""
        self._addresses: dict[str, WorkerAddress] = {}
        """Boot id -> address, from the sealed heartbeats as last read. Calls are sent to these addresses only."""
        self._fleet_changed = asyncio.Event()
        """Set, and replaced by a new one, when the fleet has changed."""
        self._group: asyncio.TaskGroup | None = None
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Keep the event streams open until cancelled. Workers then end this gateway's calls after a grace period."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=30.0, socket_factory=watched_socket, resolver=_NameResolver()
        )
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    self._session, self._group = session, group
                    for at in self._addresses.values():
                        self._connect(at)
                    await asyncio.get_running_loop().create_future()
            finally:
                self._session = self._group = None
                for connection in self._connections.values():
                    connection.client.close()
                self._connections.clear()

    def follow(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Update to the present fleet: open streams to new processes, and note which are gone. Never waits."""
        self._addresses = {beat.boot: beat.at for beat in heartbeats if beat.protocol == PROTOCOL_VERSION}
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()
        if self._group is None:
            return
        successors = {at.worker: at.boot for at in self._addresses.values()}
        for boot, connection in list(self._connections.items()):
            if boot in self._addresses:
                connection.stream.note_return()
            else:
                connection.stream.note_departure()
                if successors.get(connection.stream.at.worker, boot) != boot:
                    connection.stream.lose("was restarted")
        for at in self._addresses.values():
            self._connect(at)

    @asynccontextmanager
    async def start(
        self,
        at: WorkerAddress,
        call: Call,
        request: GenerateRequest,
        *,
        on_end: Callable[[Finished | Failed], None] = lambda end: None,
        on_overflow: Callable[[PaddockError], None] = lambda error: None,
        context: TraceContext | None = None,
    ) -> AsyncIterator[Mailbox]:
        """Submit a call, as `Upstream.start`. If the worker refuses the call, the mailbox gets a `Failed` event."""
        connection = await self._connected(at)
        number = next(self._numbers)
        kind = MailboxWithSettings if "settings" in request.tell else Mailbox
        held = None if self._reserve is None else self._reserve(call.principal)
        mailbox = kind(self._buffer_events, on_overflow, on_end, held)
        submit = Submit(
            gateway=self._gateway_id,
            call=number,
            request=request,
            tenant=call.principal.team,
            weight=call.principal.weight,
            request_id=call.request_id,
            deadline=call.begin_by,
            traceparent="" if context is None else context.traceparent,
            tracestate="" if context is None else context.state,
        )
        connection.stream.attach(number, mailbox)
        # Events can come before the worker's 202, and the submit can fail: one mailbox takes whichever comes first.
        submitting = connection.group.create_task(self._submit(connection, submit, mailbox))
        try:
            yield mailbox
        finally:
            connection.stream.detach(number)
            mailbox.close()
            if not mailbox.ended:
                # A short answer can be whole before the 202 is read. Cancelling then would only close the connection.
                submitting.cancel()
                connection.cancellations.add([number])

    async def pool(
        self,
        at: WorkerAddress,
        call: Call,
        request: PoolRequest,
        context: TraceContext | None = None,
        hold: Callable[[int], None] = lambda num_bytes: None,
    ) -> PoolResult:
        """Have one worker compute embeddings or ranks, as `Upstream.pool`. Raises CallFailed, Stopping."""
        asked = msgspec.structs.replace(
            request,
            tenant=call.principal.team,
            request_id=call.request_id,
            traceparent="" if context is None else context.traceparent,
            tracestate="" if context is None else context.state,
        )
        connection, reader = await self._connected(at), ResultReader(hold)
        return await connection.client.ask("POST", POOL_PATH, asked, reader, call.deadline - time.monotonic())

    async def ask(
        self,
        at: WorkerAddress,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        decode: Callable[[bytes], ReplyT],
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> ReplyT:
        """Send one question to one worker and return the answer. Raises CallFailed, Stopping."""
        # Questions contain prompts, too: none is sent before the worker has proved that it knows the secret.
        connection = await self._connected(at)
        return await connection.client.ask(method, path, message, WholeReply(decode), timeout_s)

    def is_lost(self, boot: str) -> bool:
        """Return whether the worker process is known to be gone, although the fleet may still list it."""
        return boot in self._lost

    def hears(self, boot: str) -> bool:
        """Return whether the event stream to this worker process is open and not silent. The worker has proved on it
        that it knows the secret."""
        connection = self._connections.get(boot)
        return connection is not None and connection.stream.is_heard

    @property
    def any_lost(self) -> bool:
        return bool(self._lost)

    async def _connected(self, at: WorkerAddress) -> WorkerConnection:
        """Return a worker's connection once its heartbeat is read and its stream open. Raises CallFailed, Stopping."""
        if at.boot not in self._connections and at.boot not in self._addresses:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECORD_TIMEOUT_S):
                    while at.boot not in self._addresses:
                        await self._fleet_changed.wait()
        sealed = self._addresses.get(at.boot)
        connection = self._connections.get(at.boot) if sealed is None else self._connect(sealed)
        # Whoever can write to Redis can forge a lease that names a worker of another model, or a wrong address.
        known = None if connection is None else connection.stream.at
        if known is not None and (known.worker, known.model) != (at.worker, at.model):
            connection = None
        if connection is None or connection.stream.lost or not await connection.stream.wait_open(SETTLE_TIMEOUT_S):
            message = f"The worker {at.worker} cannot be reached. Send the request again."
            raise NotReached(Failure(FailureCode.WORKER_LOST, message))
        if self._session is None:
            raise stopping()
        return connection

    def _connect(self, at: WorkerAddress) -> WorkerConnection:
        """Return the connection to a worker process; make it if there is none yet. Raises Stopping."""
        connection = self._connections.get(at.boot)
        if connection is not None:
            return connection
        if self._group is None or self._session is None:
            raise stopping()
        credentials = Credentials(self._secret, at)
        client = WorkerClient(self._session, credentials, self._gateway_id)
        cancellations = Cancellations(client, at.worker, self._group)
        stream = WorkerStream(self._gateway_id, credentials, cancellations.add, self._lost, self._turns)
        connection = self._connections[at.boot] = WorkerConnection(stream, client, cancellations, self._group)
        self._group.create_task(self._run_stream(stream))
        return connection

    async def _submit(self, connection: WorkerConnection, submit: Submit, mailbox: Mailbox) -> None:
        try:
            accepted = await connection.client.submit(submit)
            if isinstance(mailbox, MailboxWithSettings):
                ran_with = accepted.sampling
                mailbox.release(None if ran_with is None else Settings(submit.call, accepted.prompt, ran_with))
        except CallFailed as failed:
            mailbox.put(Failed(submit.call, failed.failure))
            if failed.failure.code is FailureCode.WORKER_LOST:
                connection.cancellations.add([submit.call])  # the worker may have got the call all the same
        except Exception:  # the edge of this task: an error of one call must not end all others, and the gateway
            log.exception("a call could not be submitted", extra={"fields": {"worker": connection.stream.at.worker}})
            message = f"The call could not be sent to the worker {connection.stream.at.worker}. Send it again."
            mailbox.put(Failed(submit.call, Failure(FailureCode.WORKER_LOST, message)))
            connection.cancellations.add([submit.call])

    async def _run_stream(self, stream: WorkerStream) -> None:
        try:
            await stream.run()
        except Exception:  # one worker's stream must not end the others; its own calls are ended here
            log.exception("event stream crashed", extra={"fields": {"worker": stream.at.worker}})
            stream.lose("broke its event stream")
        finally:
            connection = self._connections.pop(stream.at.boot, None)
            if connection is not None:
                connection.client.close()
            self._lost.discard(stream.at.boot)


class _NameResolver(AbstractResolver):
    """Has aiohttp's connections use RESOLVER, like all others of this process."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found: list[ResolveResult] = []
        for address in await RESOLVER.addresses(host):
            kind = socket.AF_INET6 if ":" in address else socket.AF_INET
            if family in (socket.AF_UNSPEC, kind):
                found.append({"hostname": host, "host": address, "port": port, "family": kind, "proto": 0, "flags": 0})
        if not found:
            raise OSError(f"{host!r} has no address of the family {family.name}")
        return found

    async def close(self) -> None:
        pass


MAX_TRIES = 3
TAKES_NOTHING = (FailureCode.BUSY, FailureCode.DRAINING, FailureCode.UNAVAILABLE)


class WorkerQueries:
    """Asks workers questions that take no slot: about texts and tokens, properties, contents of slots, adapters.

    `ask_any` is for questions to which all workers of a model have the same answer, `ask_each` for those to which each
    has its own."""

    def __init__(self, fleet: FleetView, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay

    def workers(self, model: str) -> list[Heartbeat]:
        """Return the model's workers that can be asked, sorted by id. A model's slots are numbered in this order."""
        beats = self._fleet.snapshot.of(model)
        return sorted((beat for beat in beats if not self._relay.is_lost(beat.boot)), key=lambda beat: beat.worker)

    async def ask_any(
        self,
        model: str,
        method: str,
        path: str,
        decode: Callable[[bytes], ReplyT],
        message: msgspec.Struct | None = None,
    ) -> ReplyT:
        """Ask the least busy worker; if it can't be reached or takes no questions now, the next. Raises PaddockError.

        At most MAX_TRIES workers are asked. If a worker is lost while it answers, no other is asked: the question may
        have killed it."""
        failure: Failure | None = None
        for beat in sorted(self.workers(model), key=lambda beat: beat.slots_busy / max(1, beat.slots))[:MAX_TRIES]:
            try:
                return await self._relay.ask(beat.at, method, path, message, decode)
            except CallFailed as failed:
                failure = failed.failure
                if not (isinstance(failed, NotReached) or failure.code in TAKES_NOTHING):
                    break
        if failure is None:
            raise no_worker(model)
        raise error_for(failure)

    async def num_tokens(self, model: str, request: GenerateRequest, team: str) -> int:
        """Return how many tokens the prompt of a request has, as counted by a worker. Raises PaddockError."""
        render = Render(request=request, text=False, tenant=team)
        rendered = await self.ask_any(model, "POST", RENDER_PATH, decode_rendered, render)
        return rendered.num_tokens or 0

    async def ask_worker(
        self,
        beat: Heartbeat,
        method: str,
        path: str,
        decode: Callable[[bytes], ReplyT],
        message: msgspec.Struct | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> ReplyT:
        """Ask one worker. Raises PaddockError."""
        try:
            return await self._relay.ask(beat.at, method, path, message, decode, timeout_s)
        except CallFailed as failed:
            raise error_for(failed.failure) from None

    async def ask_each(
        self,
        model: str,
        method: str,
        path: str,
        decode: Callable[[bytes], ReplyT],
        message: msgspec.Struct | None = None,
    ) -> list[tuple[Heartbeat, ReplyT]]:
        """Return every worker's answer, in the order of `workers`. Raises PaddockError if a worker does not answer."""
        beats = self.workers(model)
        if not beats:
            raise no_worker(model)
        replies = await asyncio.gather(*(self.ask_worker(beat, method, path, decode, message) for beat in beats))
        return list(zip(beats, replies, strict=True))
