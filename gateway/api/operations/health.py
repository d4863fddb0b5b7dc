"""The routes about the gateway itself, `/health`, `/ready` and `/version`, for probes: without a key or admission.

They show counts and names of models, never who asks for what. If that is too much to show, bind the gateway to loopback
or keep them behind the ingress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import redis.asyncio
from starlette.types import Receive, Scope, Send

from gateway import __version__
from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.back_pressure import stopping
from gateway.call import Principal
from gateway.catalog.live import LiveCatalog
from gateway.errors import Unavailable
from gateway.registry.snapshot import FirstWorkers, FleetView
from gateway.store.outage import NO_ANSWER

T = TypeVar("T")


class SharedQuery(Generic[T]):
    """Runs one query for all tasks of an event loop that await it. Cancelling one of them does not stop the query."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], fresh_s: float) -> None:
        """`fresh_s`: seconds for which a result is used again, counted from when its query began."""
        self._ask = ask
        self._fresh_s = fresh_s
        self._asked_at = 0.0
        self._task: asyncio.Task[T] | None = None

    async def ask(self) -> T:
        """Return the last result if it is fresh, else wait for a new one. Raises what the query raises."""
        if self._task is None or (self._task.done() and not self._is_fresh(self._task)):
            self._asked_at = time.monotonic()
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(_retrieve)
        return await asyncio.shield(self._task)

    def _is_fresh(self, task: asyncio.Task[T]) -> bool:
        is_answer = not task.cancelled() and task.exception() is None
        return is_answer and time.monotonic() - self._asked_at <= self._fresh_s


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's exception: otherwise asyncio logs it if nobody awaits the task any more."""
    if not task.cancelled():
        task.exception()


REDIS_PATIENCE_S = 1.0
FRESH_S = 0.1
"""Seconds for which a result from Redis is used again: anybody may request `/ready`, and a query takes a connection."""

MAX_NAMES_TOLD = 20


class Health:
    """Answers that the process is up, and whether it asks this machine's callers for no key."""

    def __init__(self, *, is_open: bool) -> None:
        self._body = {"status": "ok", **({"open": True} if is_open else {})}

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._body, request_log_of(scope))


async def version(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the version of Paddock, in the form of vLLM's route."""
    await send_json(send, {"version": __version__}, request_log_of(scope))


class AdmissionState(Protocol):
    """The part of the admission that `Ready` uses."""

    @property
    def can_place_degraded(self) -> bool: ...
    @property
    def degraded_models(self) -> frozenset[str]: ...
    @property
    def redis_up(self) -> bool: ...


class UnloadedModels(Protocol):
    """The part of `DesiredModels` that `Ready` uses."""

    async def unloaded(self, models: Sequence[str]) -> frozenset[str]: ...


class Ready:
    """Answers whether calls would be served. All of this must hold: there is a worker, or the catalog names models
    (their calls wait for a worker); each model that should have workers has had one, or was unloaded, or has been
    waited for long enough (`FirstWorkers`); this process was not asked to drain or stop; Redis takes writes, or this
    gateway can place calls on its own share of the slots (`degraded`)."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        fleet: FleetView,
        admission: AdmissionState,
        leaving: Callable[[], bool],
        catalog: LiveCatalog,
        first: FirstWorkers,
        desired: UnloadedModels,
    ) -> None:
        self._redis = redis
        self._redis_answers = SharedQuery(self._ping_redis, FRESH_S)
        self._fleet = fleet
        self._admission = admission
        self._leaving = leaving
        self._catalog = catalog
        self._first = first
        self._unloaded = SharedQuery(lambda: desired.unloaded(sorted(first.missing)), FRESH_S)

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        if self._leaving():
            raise stopping(remedy="")
        missing, named = [], self._catalog.names.models
        # A Redis that answers pings may refuse to write all the same.
        takes = self._admission.redis_up and await self._redis_answers.ask()
        if not takes and not self._admission.can_place_degraded:
            missing.append("Redis does not answer, or takes no writes (check PADDOCK_REDIS_URL, and its log)")
        snapshot = self._fleet.snapshot
        num_workers = sum(not beat.draining for beats in snapshot.workers.values() for beat in beats)
        if num_workers == 0 and not named:
            missing.append("no worker is registered (start one with `paddock worker` on the same Redis)")
        if awaited := await self._find_awaited():
            missing.append(
                f"no worker of {_list_models(awaited)} was seen yet (they load, or `paddock worker` is to start)"
            )
        if missing:
            raise Unavailable(f"Not ready: {'; '.join(missing)}.")
        models = sorted(model for model, beats in snapshot.workers.items() if beats)
        body = {"status": "ready", "workers": num_workers, "models": models}
        if without := sorted(named.difference(models)):
            body["without_workers"] = without
        if self._catalog.fault:
            # What is wrong may tell of paths and settings: log and GET /admin/catalog have it.
            body["catalog"] = "refused"
        if degraded_models := (self._admission.degraded_models if takes else frozenset(models)):
            body |= {"status": "degraded", "without_redis": sorted(degraded_models)}
        await send_json(send, body, request_log_of(scope))

    async def _find_awaited(self) -> list[str]:
        """Return the models that still wait for a first worker, except those that an admin has unloaded."""
        missing = self._first.missing
        return sorted(missing - await self._unloaded.ask()) if missing else []

    async def _ping_redis(self) -> bool:
        try:
            async with asyncio.timeout(REDIS_PATIENCE_S):
                await self._redis.ping()
        except NO_ANSWER:
            return False
        return True


def _list_models(models: Sequence[str]) -> str:
    more = len(models) - MAX_NAMES_TOLD
    return ", ".join(f"`{model}`" for model in models[:MAX_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
