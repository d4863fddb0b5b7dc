"""Resumable streams in Redis: what was sent, who may have it again, whether it still grows and who reads it.

Events are numbered from 1. One gateway writes a stream, any gateway reads it. Methods raise StoreUnavailable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from gateway.store.trouble import NO_ANSWER, answered, is_of_one_name, reading, unavailable
from workers.protocol import keys


@dataclass(frozen=True, slots=True)
class StreamHead:
    """Whose stream it is, and of which request."""

    team: str
    request: str
    """What the request said, as a digest."""
    gateway: str
    """Who writes it."""
    trace: str = ""
    """Where in a trace it is made, as a `traceparent`; empty: nowhere."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events `first` to `last`, as clients get them."""

    first: int
    last: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """What is new of one stream."""

    stream: str
    head: StreamHead
    batch: Batch | None
    keep_from: int
    """Number of the oldest event that is still kept."""
    ended: bool
    last: int
    """Number of the newest event."""
    renew: bool = True
    """It lives on, and is to be told whether it shall; without this, only what is new is added."""


@dataclass(frozen=True, slots=True)
class Page:
    batches: tuple[Batch, ...]
    ended: bool
    """Nothing follows these."""


class StreamLog:
    def __init__(self, redis: redis.asyncio.Redis, kept_s: float, running_s: float = keys.STREAM_TTL_S) -> None:
        """`kept_s`: how long a stream stays after its end; `running_s`: how long without a sign of its gateway."""
        self._redis = redis
        self._kept_ms = round(kept_s * 1000)
        self._running_ms = round(running_s * 1000)

    async def write(self, writes: Sequence[Write]) -> frozenset[str]:
        """Writing the same again changes nothing. Ids of those of the renewed streams that are to end."""
        asked: list[tuple[int, str]] = []
        async with self._redis.pipeline(transaction=False) as pipeline:
            for write in writes:
                _add(pipeline, write)
                if write.renew:
                    _renew(pipeline, write, self._kept_ms if write.ended else self._running_ms)
                    asked.append((len(pipeline) - 1, write.stream))
            answers = await answered(pipeline.execute(raise_on_error=False))
        for answer in answers:
            # What was added before a connection broke is refused the second time, and a name that something else has
            # taken can't be written: neither is a reason to keep the other streams back.
            if isinstance(answer, NO_ANSWER) and not is_of_one_name(answer):
                raise unavailable(answer)
        return frozenset(stream for position, stream in asked if answers[position] == b"1")

    async def head(self, stream: str) -> StreamHead | None:
        """None: there is no such stream, or no more."""
        names = ["team", "request", "gateway", "trace"]
        found: list[Any] = await answered(self._redis.hmget(keys.stream(stream), names))
        *fields, trace = found
        if None in fields:
            return None
        with reading():
            team, request, gateway = ((field or b"").decode() for field in fields)
            return StreamHead(team, request, gateway, (trace or b"").decode())

    async def read(self, stream: str, after: int, num_batches: int) -> Page:
        """Return what follows an event, at most so many batches; the first may begin before that."""
        log = keys.stream_log(stream)
        entries: Any = await answered(self._redis.xrange(log, min=f"({after}-0", count=num_batches))
        with reading():
            batches = tuple(_batch(id_, fields) for id_, fields in entries if b"end" not in fields)
        return Page(batches, len(batches) < len(entries))

    async def ended_by(self, stream: str, number: int) -> bool:
        """Whether it has ended, with that event or before it."""
        entries: Any = await answered(self._redis.xrevrange(keys.stream_log(stream), count=1))
        with reading():
            return any(b"end" in fields and int(id_.partition(b"-")[0]) <= number for id_, fields in entries)

    async def has_ended(self, stream: str) -> bool:
        entries: Any = await answered(self._redis.xrevrange(keys.stream_log(stream), count=1))
        return any(b"end" in fields for _, fields in entries)

    async def sign(self, stream: str) -> None:
        """Tells the stream's gateway that somebody reads."""
        name = keys.stream_readers(stream)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.incr(name)
            pipeline.pexpire(name, round(keys.STREAM_READERS_TTL_S * 1000))
            await answered(pipeline.execute())

    async def signs(self, stream: str) -> bytes | None:
        """Another value than before: somebody reads elsewhere."""
        found: Any = await answered(self._redis.get(keys.stream_readers(stream)))
        return found if isinstance(found, bytes) else None

    async def ask_to_end(self, stream: str) -> None:
        """Its gateway ends it at the next renewal."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hset(keys.stream(stream), "end", "1")
            # Where it has just expired, nothing may stay.
            pipeline.pexpire(keys.stream(stream), self._running_ms)
            await answered(pipeline.execute())

    async def forget(self, streams: Sequence[str]) -> None:
        if not streams:
            return
        async with self._redis.pipeline(transaction=False) as pipeline:
            for stream in streams:
                for name in (keys.stream(stream), keys.stream_log(stream), keys.stream_readers(stream)):
                    pipeline.delete(name)
            await answered(pipeline.execute())


def _add(pipeline: Any, write: Write) -> None:
    log, batch = keys.stream_log(write.stream), write.batch
    if batch is not None:
        pipeline.xadd(log, {"first": batch.first, "body": batch.body}, id=f"{batch.last}-0")
    if write.ended:
        pipeline.xadd(log, {"end": "1"}, id=f"{write.last}-1")
    if write.keep_from > 1:
        pipeline.xtrim(log, minid=f"{write.keep_from}-0", approximate=False)


def _renew(pipeline: Any, write: Write, ttl_ms: int) -> None:
    """The last of the answers tells whether the stream is to end."""
    head, told = keys.stream(write.stream), write.head
    fields = {"team": told.team, "request": told.request, "gateway": told.gateway}
    pipeline.hset(head, mapping=fields | {"trace": told.trace} if told.trace else fields)
    pipeline.pexpire(head, ttl_ms)
    pipeline.pexpire(keys.stream_log(write.stream), ttl_ms)
    pipeline.hget(head, "end")


def _batch(id_: bytes, fields: dict[bytes, bytes]) -> Batch:
    return Batch(int(fields[b"first"]), int(id_.partition(b"-")[0]), fields[b"body"])
