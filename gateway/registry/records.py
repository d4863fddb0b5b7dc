"""Reads the records of workers, and the prefix hashes (heads) that they have written as a whole."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import ResponseError

from gateway.store.trouble import NO_ANSWER, is_of_one_name
from gateway.store.unreadable import Unreadable
from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, PROTOCOL_VERSION, SEAL, Heartbeat, decode_heartbeat
from workers.protocol.metrics.of_gateway import Unread
from workers.protocol.news import unpack_heads
from workers.protocol.proofs import fits, seal_heartbeat

log = logging.getLogger(__name__)

MAX_NAMED = 256
"""Most workers left out that the log names; names are whatever stands in Redis."""
MAX_NAME_CHARS = 512
"""Most characters of a model's or worker's name."""

Place = tuple[str, str]
"""The key of a worker: its model and its id."""


@dataclass(frozen=True, slots=True)
class Heads:
    version: int
    """Number of the last news that they include."""
    tokens: Mapping[int, int]
    """Head -> tokens."""


class Records:
    """Reads workers' records and heads. Workers of another protocol version, and records that can't be read or that no
    holder of the worker secret wrote for this key, are left out, which is logged once.

    Methods raise redis.RedisError.
    """

    def __init__(
        self, redis: redis.asyncio.Redis, secret: str, refused: Callable[[], None], unreadable: Unreadable
    ) -> None:
        """`refused` is told of each record that is not sealed with the secret, `unreadable` of what can't be read."""
        self._redis = redis
        self._secret = secret
        self._refused = refused
        self._unreadable = unreadable
        self._left_out: set[Place] = set()

    async def models(self, known: frozenset[str]) -> frozenset[str]:
        """Return every model that has ever had a worker on this Redis; `known` where the key has another type."""
        try:
            names = await self._redis.smembers(keys.MODELS)
        except ResponseError as error:
            if not is_of_one_name(error):
                raise
            self._unreadable.skip(Unread.MODELS, keys.MODELS, error)
            return known
        return frozenset(self._texts(Unread.MODELS, names))

    async def all(self, models: Iterable[str]) -> tuple[dict[Place, Heartbeat], frozenset[str]]:
        """Return every worker's record, and the models whose list of workers can't be read. Takes two round trips."""
        asked = sorted(models)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model in asked:
                pipeline.smembers(keys.workers(model))
            answers = await pipeline.execute(raise_on_error=False) if asked else []
        places: list[Place] = []
        unread = set[str]()
        for model, members in zip(asked, answers, strict=True):
            if isinstance(members, NO_ANSWER):
                if not is_of_one_name(members):
                    raise members
                self._unreadable.skip(Unread.WORKERS, keys.workers(model), members)
                unread.add(model)
                continue
            places += [(model, id) for id in self._texts(Unread.WORKERS, members)]
        return await self.some(places), frozenset(unread)

    async def some(self, places: Sequence[Place]) -> dict[Place, Heartbeat]:
        """Return the records of these workers, of those that have one."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model, worker in places:
                pipeline.hmget(keys.worker(model, worker), BEAT, SEAL)
            answers = await pipeline.execute(raise_on_error=False) if places else []
        found: dict[Place, Heartbeat] = {}
        for place, answer in zip(places, answers, strict=True):
            if isinstance(answer, NO_ANSWER):
                if not is_of_one_name(answer):
                    raise answer
                self._unreadable.skip(Unread.WORKER, keys.worker(*place), answer)
                continue
            record, seal = answer
            beat = self._read(place, record, seal or b"") if isinstance(record, bytes) else None
            if beat is not None:
                found[place] = beat
        return found

    async def heads(self, places: Sequence[Place]) -> dict[Place, Heads | None]:
        """Return the heads of these workers. None: the worker has written none, or they can't be read."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model, worker in places:
                pipeline.get(keys.worker_heads(model, worker))
            answers = await pipeline.execute(raise_on_error=False) if places else []
        return {place: self._heads(place, packed) for place, packed in zip(places, answers, strict=True)}

    def _read(self, place: Place, record: bytes, seal: bytes) -> Heartbeat | None:
        try:
            beat = decode_heartbeat(record)
        except ValueError as error:  # msgspec's own, and UnicodeDecodeError
            self._unreadable.skip(Unread.WORKER, place[1], error)
            return None
        if beat.protocol != PROTOCOL_VERSION:
            self._leave_out(place, f"it speaks protocol {beat.protocol}, this gateway {PROTOCOL_VERSION}")
            return None
        # A true record of one worker, copied to another's key, would have that one's calls sent to it.
        if (beat.model, beat.worker) != place or not fits(seal, seal_heartbeat(self._secret, record)):
            self._refused()
            self._leave_out(
                place,
                "its record is not sealed with this gateway's worker secret, so something else wrote it",
                "give gateways and workers the same PADDOCK_WORKER_SECRET, or see who may write to Redis",
            )
            return None
        self._left_out.discard(place)
        return beat

    def _leave_out(self, place: Place, why: str, remedy: str = "update the older of the two") -> None:
        """Log that a worker is left out, once per worker: records are read again and again."""
        if place not in self._left_out and len(self._left_out) < MAX_NAMED:
            log.warning("worker %s is left out: %s; %s", place[1][:MAX_NAME_CHARS], why, remedy)
            self._left_out.add(place)

    def _heads(self, place: Place, packed: object) -> Heads | None:
        if packed is None:
            return None
        try:
            if isinstance(packed, bytes):
                return Heads(*unpack_heads(packed))
            why: object = packed
        except (struct.error, ValueError) as error:
            why = error
        self._unreadable.skip(Unread.HEADS, keys.worker_heads(*place), why)
        return None

    def _texts(self, kind: Unread, values: Iterable[object]) -> Iterator[str]:
        """Yield the values that are names of models or workers."""
        for value in values:
            try:
                text = value.decode() if isinstance(value, bytes) else str(value)
            except UnicodeDecodeError as error:
                self._unreadable.skip(kind, value, error)
                continue
            if 0 < len(text) <= MAX_NAME_CHARS and text.isprintable():
                yield text
            else:
                self._unreadable.skip(kind, text, "it is no name")
