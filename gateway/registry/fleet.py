"""Follows the workers' heartbeats: one immutable snapshot, replaced several times a second, never patched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from gateway.registry.adapter_names import NOTHING, Contents, agreed, callable_adapters, contents_of
from gateway.routing.pool import Pool, PoolBook
from gateway.store.cancellation import raise_if_cancelled
from gateway.store.channel import follow
from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, PROTOCOL_VERSION, Heartbeat, decode_heartbeat

log = logging.getLogger(__name__)

NO_POOL = Pool()


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Who is there. Workers of another protocol version, and records that can't be read, are left out."""

    workers: Mapping[str, tuple[Heartbeat, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> its live workers by id, draining ones included; models without any are not in it."""
    models: frozenset[str] = frozenset()
    """Every model that has ever had a worker on this Redis."""
    adapters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Adapter -> its model, for those that can be called as `model`."""
    contents: Mapping[str, Contents] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> its adapters by name -> SHA-256, registered ones that no worker has yet included."""

    def of(self, model: str) -> tuple[Heartbeat, ...]:
        return self.workers.get(model, ())

    def membership(self) -> frozenset[tuple[str, str, str, str, int, bool]]:
        """What is worth telling when it changes: who is there, as which process, where, how large, draining or not."""
        return frozenset(
            (model, worker.worker, worker.boot, worker.address, worker.slots, worker.draining)
            for model, workers in self.workers.items()
            for worker in workers
        )


class _Name(msgspec.Struct):
    """As much of a heartbeat as every version has."""

    worker: str = "?"


class Fleet:
    """The fleet as Redis has it, at most `interval_s` old while Redis answers; the last known one while it does not."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        on_change: Callable[[FleetSnapshot], None] | None = None,
        *,
        interval_s: float = keys.HEARTBEAT_INTERVAL_S,
        registered: Callable[[], Mapping[str, Contents]] = dict,
    ) -> None:
        """`registered`: model -> adapters that all its workers are to have -> SHA-256."""
        self.snapshot = FleetSnapshot()
        self._redis = redis
        self._listeners = [on_change] if on_change else []
        self._interval_s = interval_s
        self._registered = registered
        self._hurry = asyncio.Event()
        self._left_out: set[str] = set()
        self._away = False
        self._books: dict[str, PoolBook] = {}

    def pool(self, model: str) -> Pool:
        """Its workers as `gateway.routing.rank` reads them, as of now."""
        book = self._books.get(model)
        return book.pool if book else NO_POOL

    def listen(self, on_change: Callable[[FleetSnapshot], None]) -> None:
        """Calls `on_change` when a worker joins, leaves, restarts, starts or stops draining, or changes its size."""
        self._listeners.append(on_change)

    async def refresh(self) -> FleetSnapshot:
        """Reads the fleet now. Raises redis.RedisError when Redis is away; the snapshot then stays as it was."""
        models = sorted(_text(name) for name in await self._redis.smembers(keys.MODELS))
        found = {model: self._readable(records) for model, records in (await self._records(models)).items()}
        registered = self._registered()
        contents = {
            model: contents_of(found.get(model, ()), registered.get(model, NOTHING))
            for model in found.keys() | registered.keys()
        }
        there = {model: agreed(workers, contents[model]) for model, workers in found.items() if workers}
        adapters = MappingProxyType(callable_adapters(contents))
        snapshot = FleetSnapshot(MappingProxyType(there), frozenset(models), adapters, MappingProxyType(contents))
        changed = snapshot.membership() != self.snapshot.membership()
        self.snapshot = snapshot
        self._note(there)
        if changed:
            for listener in self._listeners:
                listener(snapshot)
        return snapshot

    def _note(self, there: Mapping[str, tuple[Heartbeat, ...]]) -> None:
        now = time.monotonic()
        for model in self._books.keys() | there.keys():
            book = self._books.setdefault(model, PoolBook())
            beats = {beat.worker: beat for beat in there.get(model, ())}
            for worker in book.workers():
                if worker not in beats:
                    book.leave(worker)
            for worker, beat in beats.items():
                known = book.beat(worker)
                if known is None or known.boot != beat.boot:
                    book.join(beat, now=now)
                else:
                    book.renew(beat, now=now)

    async def run(self) -> None:
        """Keeps the snapshot fresh until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._redis, keys.FLEET_CHANNEL, lambda _: self._hurry.set(), self._hurry.set))
            tasks.create_task(self._poll())

    async def _poll(self) -> None:
        while True:
            self._hurry.clear()
            try:
                await self.refresh()
                if self._away:
                    log.info("the fleet can be read again")
                self._away = False
            except (RedisError, OSError) as error:
                if not self._away:
                    log.warning("the fleet can't be read (%s: %s); keeping the last one", type(error).__name__, error)
                self._away = True
            raise_if_cancelled()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()

    async def _records(self, models: list[str]) -> dict[str, list[bytes]]:
        """Model -> its workers' records as they are, in two round trips for all models."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model in models:
                pipeline.smembers(keys.workers(model))
            ids = [sorted(_text(worker) for worker in members) for members in await pipeline.execute()]
            asked = [(model, workers) for model, workers in zip(models, ids, strict=True) if workers]
            for model, workers in asked:
                for worker in workers:
                    pipeline.hget(keys.worker(model, worker), BEAT)
            answers = iter(await pipeline.execute(raise_on_error=False))
        return {model: [r for _ in workers if isinstance(r := next(answers), bytes)] for model, workers in asked}

    def _readable(self, records: Iterable[bytes]) -> tuple[Heartbeat, ...]:
        beats = (self._read(record) for record in records)
        return tuple(beat for beat in beats if beat is not None)

    def _read(self, record: bytes) -> Heartbeat | None:
        try:
            beat = decode_heartbeat(record)
        except msgspec.MsgspecError as error:
            self._leave_out(record, f"its record can't be read: {error}")
            return None
        if beat.protocol != PROTOCOL_VERSION:
            self._leave_out(record, f"it speaks protocol {beat.protocol}, this gateway {PROTOCOL_VERSION}")
            return None
        self._left_out.discard(beat.worker)
        return beat

    def _leave_out(self, record: bytes, why: str) -> None:
        """Once per worker: heartbeats come twice a second."""
        try:
            worker = msgspec.json.decode(record, type=_Name).worker
        except msgspec.MsgspecError:
            worker = "?"
        if worker not in self._left_out:
            log.warning("worker %s is left out: %s; update the older of the two", worker, why)
            self._left_out.add(worker)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
