"""Reads the records of workers, and the heads that they have written as a whole."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import redis.asyncio

from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, PROTOCOL_VERSION, Heartbeat, decode_heartbeat
from workers.protocol.news import unpack_heads

log = logging.getLogger(__name__)

Place = tuple[str, str]
"""A model, and a worker of it."""


@dataclass(frozen=True, slots=True)
class Heads:
    version: int
    """Number of the last news that are in them."""
    tokens: Mapping[int, int]
    """Head -> tokens."""


class _Name(msgspec.Struct):
    """As much of a heartbeat as every version has."""

    worker: str = "?"


class Records:
    """Workers of another protocol version, and records that can't be read, are left out, which is logged once.

    Methods raise redis.RedisError.
    """

    def __init__(self, redis: redis.asyncio.Redis) -> None:
        self._redis = redis
        self._left_out: set[str] = set()

    async def models(self) -> frozenset[str]:
        """Every model that has ever had a worker on this Redis."""
        return frozenset(_text(name) for name in await self._redis.smembers(keys.MODELS))

    async def all(self, models: Iterable[str]) -> dict[Place, Heartbeat]:
        """Two round trips."""
        asked = sorted(models)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model in asked:
                pipeline.smembers(keys.workers(model))
            members = await pipeline.execute()
        places = [(model, _text(id)) for model, ids in zip(asked, members, strict=True) for id in ids]
        return await self.some(places)

    async def some(self, places: Sequence[Place]) -> dict[Place, Heartbeat]:
        """Those of these that are there."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model, worker in places:
                pipeline.hget(keys.worker(model, worker), BEAT)
            answers = await pipeline.execute(raise_on_error=False) if places else []
        found: dict[Place, Heartbeat] = {}
        for place, record in zip(places, answers, strict=True):
            beat = self._read(record) if isinstance(record, bytes) else None
            if beat is not None:
                found[place] = beat
        return found

    async def heads(self, places: Sequence[Place]) -> dict[Place, Heads | None]:
        """None: the worker has written none, or what can't be read."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model, worker in places:
                pipeline.get(keys.worker_heads(model, worker))
            answers = await pipeline.execute(raise_on_error=False) if places else []
        return {place: _heads(packed) for place, packed in zip(places, answers, strict=True)}

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
        """Once per worker: records are read again and again."""
        try:
            worker = msgspec.json.decode(record, type=_Name).worker
        except msgspec.MsgspecError:
            worker = "?"
        if worker not in self._left_out:
            log.warning("worker %s is left out: %s; update the older of the two", worker, why)
            self._left_out.add(worker)


def _heads(packed: object) -> Heads | None:
    try:
        return Heads(*unpack_heads(packed)) if isinstance(packed, bytes) else None
    except struct.error:
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
