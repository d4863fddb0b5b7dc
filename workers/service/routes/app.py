"""The ASGI application of one worker: `/v1/submit`, `/v1/cancel`, `/v1/events`, `/v1/pool`, `/metrics`, its probes and
routes that only some workers have.

Requests below `/v1/` need the token that gateways have for this process; drain requests, a token for draining only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.metrics.page import Page
from workers.metrics.worker import WorkerMetrics
from workers.protocol import control
from workers.protocol.control import CHALLENGE_HEADER, DRAIN_PATH, MAX_CHALLENGE_CHARS, PROOF_HEADER
from workers.protocol.events import HTTP_STATUS, CallFailed, Failure, FailureCode
from workers.protocol.framing import (
    CANCEL_PATH,
    EVENTS_PATH,
    KEEP_ALIVE,
    KEEP_ALIVE_INTERVAL_S,
    SUBMIT_PATH,
)
from workers.protocol.pooled import POOL_PATH, decode_request
from workers.protocol.requests import Accepted, Cancel, decode_submit
from workers.service.calls.generate import GenerateCalls
from workers.service.calls.pooled import PooledCalls, other_kind
from workers.service.calls.stream import EventHub, Feed
from workers.service.lifecycle import Shortage, is_shortage
from workers.service.routes.bodies import (
    PeerGone,
    answer,
    answer_of_parts,
    received,
    refusal,
    refusing,
    while_peer_stays,
)

GUARDED = "/v1/"


class WorkerAccess:
    """Checks the tokens of one worker process. A token of another process, and the secret itself, are not accepted."""

    def __init__(self, secret: str, worker: str, boot: str) -> None:
        self._secret, self._worker, self._boot = secret, worker, boot
        self._access = _bearer(control.access_token(secret, worker, boot))
        self._drain = _bearer(control.drain_token(secret, worker, boot))

    def admits(self, path: str, authorization: bytes) -> bool:
        """Return whether `authorization`, the header's value or empty, has the token that this path needs, if any."""
        if path.startswith(GUARDED):
            return control.fits(authorization, self._access)
        return not path.startswith(DRAIN_PATH) or control.fits(authorization, self._drain)

    def proof(self, challenge: str) -> str:
        """Return the worker's answer to a gateway's challenge, which proves that the worker knows the secret."""
        return control.proof(self._secret, self._worker, self._boot, challenge)


def _bearer(token: str) -> bytes:
    return b"Bearer " + token.encode()


METRICS_PATH = "/metrics"

MAX_SUBMIT_BYTES = 128 << 20
"""Maximum bytes of the body of a submit: far above a gateway's own bounds (8 MiB of text and 32 MiB of pictures and
sounds by default, at most 64 MiB of these, which are 86 MiB of base64), so only a broken peer exceeds it."""

MAX_CANCEL_BYTES = 1 << 20
"""Maximum bytes of the body of a cancel, which holds only numbers of calls."""

WRITE_BYTES = 128 << 10
STALL_S = 30.0
"""Maximum seconds of one write. A connection that takes longer counts as dead: the gateway's grace period begins."""

LOOK_S = 0.25
"""Seconds between two checks whether an event stream has been silent too long or a write to the stream hangs."""

MAX_GATEWAY_ID_CHARS = 128

_decode_cancel = msgspec.json.Decoder(Cancel).decode


class Guard:
    """Middleware that refuses requests without the token that their path needs (`WorkerAccess`), with HTTP 401."""

    def __init__(self, app: ASGIApp, access: WorkerAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not self._access.admits(scope["path"], given):
                message = (
                    "the token of this worker process is missing or wrong; give gateways and workers the same "
                    "PADDOCK_WORKER_SECRET, from which it is made"
                )
                refused = refusal(Failure(FailureCode.UNAUTHORIZED, message))
                # Nothing more that such a peer sends is read, not even its body.
                refused.headers["connection"] = "close"
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ShortageAnswers:
    """Answers requests that failed because memory was short; they would get a bare HTTP 500 otherwise."""

    def __init__(self, shortage: Shortage) -> None:
        self._shortage = shortage

    async def answer(self, request: Request, error: Exception) -> Response:
        if not is_shortage(error):
            raise error
        return refusal(self._shortage.note())


class CallRoutes:
    """The routes that submit and cancel calls."""

    def __init__(self, calls: GenerateCalls, boot: str) -> None:
        self._calls = calls
        self._boot = boot

    def routes(self) -> list[Route]:
        return [
            Route(SUBMIT_PATH, self.submit, methods=["POST"]),
            Route(CANCEL_PATH, self.cancel, methods=["POST"]),
        ]

    async def submit(self, request: Request) -> Response:
        try:
            submit = await received(request, MAX_SUBMIT_BYTES, decode_submit)
            begun = await self._calls.submit(submit)
        except CallFailed as failed:
            return refusal(failed.failure)
        return answer(Accepted(self._boot, *begun), 202)

    async def cancel(self, request: Request) -> Response:
        try:
            self._calls.cancel(await received(request, MAX_CANCEL_BYTES, _decode_cancel))
        except CallFailed as failed:
            return refusal(failed.failure)
        return Response(status_code=204)


class PoolRoutes:
    """The routes of calls at a worker that does pooled work: a submit is refused, and a cancel has nothing to do."""

    def __init__(self, calls: PooledCalls) -> None:
        self._calls = calls

    def routes(self) -> list[Route]:
        return [
            Route(POOL_PATH, self.pool, methods=["POST"]),
            refusing(SUBMIT_PATH, other_kind(self._calls.kind)),
            Route(CANCEL_PATH, self.cancel, methods=["POST"]),
        ]

    async def cancel(self, request: Request) -> Response:
        """Answer 204: no call that could be cancelled by its number runs on such a worker."""
        return Response(status_code=204)

    async def pool(self, request: Request) -> Response:
        """Answer when the whole result is computed. If the peer goes away before, cancel the call."""
        try:
            # Nothing here refers to the message, whose pictures are dropped as soon as they are read.
            pool = self._calls.pool(await received(request, MAX_SUBMIT_BYTES, decode_request))
            pooled = await while_peer_stays(request.receive, pool)
            return answer_of_parts(pooled.parts())
        except PeerGone:
            return Response(status_code=HTTP_STATUS[FailureCode.WORKER_LOST])
        except CallFailed as failed:
            return refusal(failed.failure)


class EventStream:
    """`GET /v1/events`, in raw ASGI, because it writes several hundred times a second."""

    def __init__(self, hub: EventHub, access: WorkerAccess) -> None:
        self._hub = hub
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, asked = Request(scope).query_params.get("gateway", ""), Headers(scope=scope)
        if not 0 < len(gateway) <= MAX_GATEWAY_ID_CHARS:
            message = f"the query parameter `gateway` must be 1 to {MAX_GATEWAY_ID_CHARS} characters long"
            await refusal(Failure(FailureCode.INVALID_REQUEST, message, "gateway"))(scope, receive, send)
            return
        feed = self._hub.attach(gateway, asked.get("last-event-id"))
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            proof = self._access.proof(asked.get(CHALLENGE_HEADER, "")[:MAX_CHALLENGE_CHARS])
            headers.append((PROOF_HEADER.encode(), proof.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with asyncio.TaskGroup() as group:
                pump = Pump(feed, send)
                beside = (group.create_task(_close_when_gone(receive, feed)), group.create_task(pump.watch()))
                await pump.run()
                for task in beside:
                    task.cancel()
        except* Stalled:
            pass  # the server closes the connection
        finally:
            self._hub.detach(feed)


class Stalled(Exception):
    """Raised if a write has not ended within `STALL_S`: the peer does not read, or far too slowly."""


class Pump:
    """Writes a feed's frames to the connection. `watch` finds silence and stalled writes, so no write needs a timer."""

    def __init__(self, feed: Feed, send: Send) -> None:
        self._feed = feed
        self._send = send
        self._sending = False
        self._silent = True  # sends a keep-alive at once, so that the gateway sees an open stream
        self._since = time.monotonic()
        """time.monotonic() at which the running write began, or the last one ended."""

    async def run(self) -> None:
        """Write until the feed is closed; frames published before `close` are still sent."""
        feed = self._feed
        while True:
            data = feed.take(WRITE_BYTES)
            if not data and feed.closed:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            if data or self._silent:
                self._silent = False
                await self._write(data or KEEP_ALIVE)
            else:
                await feed.wait()

    async def watch(self) -> None:
        """Have keep-alives sent during silence; raise Stalled if a write hangs. Runs in a task beside `run`."""
        while True:
            await asyncio.sleep(LOOK_S)
            age_s = time.monotonic() - self._since
            if self._sending:
                if age_s > STALL_S:
                    raise Stalled
            elif age_s > KEEP_ALIVE_INTERVAL_S - LOOK_S:
                self._silent = True
                self._feed.wake()

    async def _write(self, data: bytes) -> None:
        self._sending, self._since = True, time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending, self._since = False, time.monotonic()


async def _close_when_gone(receive: Receive, feed: Feed) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    feed.close()


def build_app(
    *, hub: EventHub, metrics: WorkerMetrics, access: WorkerAccess, shortage: Shortage, routes: Iterable[Route]
) -> Starlette:
    """Return the application of one worker. `routes`: all its routes except those for events and metrics."""
    page = Page(metrics.registry, metrics.process.count_tasks)

    async def show_metrics(request: Request) -> Response:
        asked = request.headers
        body, headers = await page.answer(asked.get("accept", ""), asked.get("accept-encoding", ""))
        return Response(body, headers=headers)

    common = [Route(EVENTS_PATH, EventStream(hub, access), methods=["GET"]), Route(METRICS_PATH, show_metrics)]
    short = ShortageAnswers(shortage)
    handlers = dict.fromkeys((MemoryError, OSError, RuntimeError), short.answer)
    guard = [Middleware(Guard, access=access)]
    return Starlette(routes=[*common, *routes], middleware=guard, exception_handlers=handlers)
