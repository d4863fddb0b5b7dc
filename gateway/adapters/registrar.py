"""Registers LoRA adapters with every worker of a model or, if one refuses, with none; and removes adapters.

Redis stores the registrations. Workers load the adapters at once; workers that can't be reached now or start later are
made to load them by `gateway.adapters.reconciler`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar
from urllib.parse import quote

from msgspec.structs import replace

from gateway.adapters.desired import AdapterRecord, DesiredAdapters
from gateway.back_pressure import no_worker
from gateway.errors import InvalidRequest, PaddockError, Unavailable, WorkerLost
from gateway.relay.relay import WorkerQueries
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.queries import (
    ADAPTERS_PATH,
    AdapterInfo,
    AdapterState,
    LoadAdapter,
    decode_adapter_infos,
    decode_info,
)

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Maximum number of workers that are sent a request at the same time; the others get theirs later."""

SETTLE_S = 3.0
"""Maximum seconds for which the client's answer is held back until the workers' heartbeats show the change. Then it is
sent anyway."""
LOOK_S = 0.05

MARGIN_S = 5.0
"""Seconds to wait for a worker's answer, beyond the `wait_s` that the worker was asked to wait."""

T = TypeVar("T")


class AdapterRegistrar:
    def __init__(self, queries: WorkerQueries, desired: DesiredAdapters) -> None:
        self._queries = queries
        self._desired = desired

    def knows(self, model: str, name: str) -> bool:
        """Return whether the adapter is registered or a worker has it."""
        beats = self._queries.workers(model)
        return name in self._desired.records(model) or any(name in beat.adapters for beat in beats)

    async def register(self, model: str, asked: LoadAdapter) -> AdapterRecord:
        """Register an adapter: every worker that answers checks the file, then all workers are told to load it.

        Raises NoWorker, Unavailable if no worker answers, and StoreUnavailable. If a worker refuses the file, nothing
        is registered, and the error of the first worker that refuses is raised."""
        beats = self._serving(model)
        record = await self._make_record(beats, model, asked)
        check = record.ask(check=True)
        await _ask_all(beats, lambda beat: self._check_on(beat, check))
        await self._desired.register(record)
        await _ask_all(beats, lambda beat: self._load_on(beat, record))
        await self._wait_for_heartbeats(beats, lambda beat: beat.adapter_hashes.get(record.name) == record.sha256)
        return record

    async def remove(self, model: str, name: str, wait_s: float) -> int:
        """Remove an adapter. Return how many calls still use it after `wait_s` seconds; these calls are not cut off.

        Raises InvalidRequest if a worker has the adapter from its settings, and StoreUnavailable."""
        beats = [beat for beat in self._queries.workers(model) if name in beat.adapters]
        fixed = await _ask_all(beats, lambda beat: self._has_fixed(beat, name))
        if any(fixed):
            raise InvalidRequest(
                f"The adapter `{name}` stands in the settings of {beats[fixed.index(True)].worker}. Take it out of the "
                "catalog's `adapters`, or of --adapters, and start the workers again.",
                param="lora_name",
            )
        await self._desired.unregister(model, name)
        left = await _ask_all(beats, lambda beat: self._unload_from(beat, name, wait_s))
        await self._wait_for_heartbeats(beats, lambda beat: name not in beat.adapters)
        return sum(left)

    async def _make_record(self, beats: list[Heartbeat], model: str, asked: LoadAdapter) -> AdapterRecord:
        """Return the adapter's record, with the SHA-256 of the file as computed by the first worker that answers."""
        for beat in beats:
            info = await self._check_on(beat, replace(asked, check=True))
            if info is not None:
                return AdapterRecord(
                    name=asked.name, base=model, path=asked.path, sha256=info.sha256, pinned=asked.pinned
                )
        raise Unavailable(f"No worker of `{model}` answered. Send the request again later.")

    async def _check_on(self, beat: Heartbeat, check: LoadAdapter) -> AdapterInfo | None:
        """Have a worker check the file. Return None if it can't be reached. Raises PaddockError if it refuses."""
        try:
            return await self._queries.ask_worker(beat, "POST", ADAPTERS_PATH, decode_info, check)
        except WorkerLost:
            return None
        except PaddockError as error:
            # The worker calls the parameter by another name.
            error.param = {"path": "lora_path", "name": "lora_name"}.get(error.param or "", error.param)
            error.message += f" (Worker {beat.worker} refuses it, so nothing is registered.)"
            raise

    async def _load_on(self, beat: Heartbeat, record: AdapterRecord) -> None:
        try:
            await self._queries.ask_worker(beat, "POST", ADAPTERS_PATH, decode_info, record.ask())
        except PaddockError as error:
            log.warning("worker %s has no adapter %s yet: %s", beat.worker, record.name, error)

    async def _has_fixed(self, beat: Heartbeat, name: str) -> bool:
        try:
            infos = await self._queries.ask_worker(beat, "GET", ADAPTERS_PATH, decode_adapter_infos)
        except WorkerLost:
            return False
        return any(info.name == name and info.fixed for info in infos)

    async def _unload_from(self, beat: Heartbeat, name: str, wait_s: float) -> int:
        path = f"{ADAPTERS_PATH}/{quote(name)}?wait_s={wait_s:g}"
        try:
            info = await self._queries.ask_worker(beat, "DELETE", path, decode_info, timeout_s=wait_s + MARGIN_S)
        except PaddockError as error:  # the worker or the adapter is gone, or the reconciler removes it later
            log.info("worker %s: adapter %s: %s", beat.worker, name, error)
            return 0
        return info.calls if info.state is AdapterState.LEAVING else 0

    def _serving(self, model: str) -> list[Heartbeat]:
        beats = [beat for beat in self._queries.workers(model) if not beat.draining]
        if not beats:
            raise no_worker(model)
        return beats

    async def _wait_for_heartbeats(self, beats: list[Heartbeat], is_told: Callable[[Heartbeat], bool]) -> None:
        """Wait until the heartbeats of all these workers show the change (`is_told`), at most SETTLE_S."""
        boots = {beat.boot for beat in beats}
        model = beats[0].model if beats else ""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:  # other processes change the heartbeats
            if all(is_told(beat) for beat in self._queries.workers(model) if beat.boot in boots):
                return
            await asyncio.sleep(LOOK_S)


async def _ask_all(beats: Iterable[Heartbeat], ask: Callable[[Heartbeat], Awaitable[T]]) -> list[T]:
    """Ask every worker and return the answers in the order of `beats`. The first exception cancels the rest."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(beat: Heartbeat) -> T:
        async with turns:
            return await ask(beat)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(beat)) for beat in beats]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
