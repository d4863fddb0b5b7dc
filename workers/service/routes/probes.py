"""The probes of a worker, `/health` and `/ready`, and its ways out of service, `/health/drain` and `/v1/leave`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.protocol.control import DRAIN_PATH, LEAVE_PATH, LONGEST_S, Leaving, seconds_of
from workers.protocol.events import Failure, FailureCode
from workers.protocol.framing import HEALTH_PATH
from workers.service.lifecycle import Lifecycle
from workers.service.routes.bodies import answer, refusal

READY_PATH = "/ready"

SETTLE_S = 0.5
"""Minimum seconds until a request to drain is answered, and until a worker leaves. Calls may still arrive in that time:
their slots were granted before gateways heard of the draining. The worker refuses them, so that gateways place them
elsewhere at once."""
LOOK_S = 0.25
"""Seconds between two checks whether the client that asked the worker to drain is still connected."""


class Calls(Protocol):
    """The part of the worker's calls that probes need."""

    @property
    def idle(self) -> asyncio.Event: ...
    @property
    def num_calls(self) -> int: ...


class Probes:
    """The probes of one worker."""

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        life: Lifecycle,
        calls: Calls,
        registered: asyncio.Event,
        drain: Callable[[], None],
        hung_s: Callable[[], float],
        boot: str,
    ) -> None:
        """`facts` returns the answer of `/health` and must not block. `drain` begins to drain and may be called again.
        `hung_s` returns the seconds that the engine's step has run beyond its bound; 0 while it has not. `boot`: id of
        this process."""
        self._facts = facts
        self._life = life
        self._calls = calls
        self._registered = registered
        self._drain = drain
        self._hung_s = hung_s
        self._boot = boot

    def routes(self) -> list[Route]:
        return [
            Route(HEALTH_PATH, self.health),
            Route(READY_PATH, self.ready),
            Route(DRAIN_PATH, self.drain, methods=["POST"]),
            Route(LEAVE_PATH, self.leave, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """Answer 200 while the engine runs, 503 while it hangs; any answer at all shows that the event loop runs."""
        hung_s = self._hung_s()
        if hung_s:
            return answer({**self._facts(), "status": "hung", "hung_s": round(hung_s, 1)}, 503)
        return answer(self._facts())

    async def ready(self, request: Request) -> Response:
        """Answer 200 once gateways know the worker and may send it calls, also while Redis is away; otherwise 503."""
        if self._hung_s():
            status = "hung"
        elif self._life.draining:
            status = "draining"
        elif self._life.reserved:
            status = "reserved"
        else:
            status = "ready" if self._registered.is_set() else "starting"
        return answer({**self._facts(), "status": status}, 200 if status == "ready" else 503)

    async def drain(self, request: Request) -> Response:
        """Begin to drain; answer when the last call has ended, or after the query's `timeout_s`."""
        try:
            timeout_s = seconds_of(request.query_params.get("timeout_s", str(LONGEST_S)))
        except ValueError as error:
            return refusal(Failure(FailureCode.INVALID_REQUEST, f"`timeout_s` {error}", "timeout_s"))
        began = time.monotonic()
        self._drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle(request)
                await asyncio.sleep(began + SETTLE_S - time.monotonic())
        calls = self._calls.num_calls
        waited_s = round(time.monotonic() - began, 3)
        return answer({"status": "draining" if calls else "drained", "calls": calls, "waited_s": waited_s})

    async def leave(self, request: Request) -> Response:
        """Begin to drain, and to end when the last call has ended; answer at once."""
        self._drain()
        self._life.leaving.set()
        return answer(Leaving(boot=self._boot, num_calls=self._calls.num_calls))

    async def _idle(self, request: Request) -> None:
        """Wait until no call runs, or the client that sent the request is gone."""
        while not self._calls.idle.is_set() and not await request.is_disconnected():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._calls.idle.wait()
