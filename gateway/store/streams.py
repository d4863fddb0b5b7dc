"""Resumable streams in Redis: their events, owners and ends, signs of their readers, and each team's quota of them.

Events are numbered from 1. One gateway writes a stream, any gateway reads it. Methods raise StoreUnavailable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import redis.asyncio

from gateway.store.client import ANSWER_TIMEOUT_S
from gateway.store.outage import NO_ANSWER, answered, is_of_one_name, reading, unavailable
from gateway.store.scripts import ScriptSender, load_stream_script
from workers.protocol import keys


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The owner, request and writer of a stream."""

    team: str
    request: str
    """Digest of the request."""
    gateway: str
    """Id of the gateway that writes it."""
    trace: str = ""
    """The `traceparent` of the span that makes it; empty: it has no trace."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The events `first` to `last`, as clients get them."""

    first: int
    last: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """The news of one stream, to be written to Redis."""

    stream: str
    head: StreamInfo
    batch: Batch | None
    keep_from: int
    """Number of the oldest event that is still kept."""
    ended: bool
    last: int
    """Number of the newest event."""
    renew: bool = True
    """Whether to renew the stream, and to ask whether it shall end; otherwise only new events are added."""


@dataclass(frozen=True, slots=True)
class Page:
    batches: tuple[Batch, ...]
    ended: bool
    """Whether the stream ends with these batches."""


class StreamLog:
    def __init__(self, redis: redis.asyncio.Redis, kept_s: float, running_s: float = keys.STREAM_TTL_S) -> None:
        """`kept_s`: seconds that a stream is kept after its end; `running_s`: without a renewal by its gateway."""
        self._redis = redis
        self._kept_ms = round(kept_s * 1000)
        self._running_ms = round(running_s * 1000)

    async def write(self, writes: Sequence[Write]) -> frozenset[str]:
        """Write the news of streams; the same again changes nothing. Return the ids of renewed ones that are to end."""
        asked: list[tuple[int, str]] = []
        async with self._redis.pipeline(transaction=False) as pipeline:
            for write in writes:
                _add(pipeline, write)
                if write.renew:
                    _renew(pipeline, write, self._kept_ms if write.ended else self._running_ms)
                    asked.append((len(pipeline) - 1, write.stream))
            answers = await answered(pipeline.execute(raise_on_error=False))
        for answer in answers:
            # Events that were added before a connection broke are refused the second time, and a key of another type
            # can't be written: neither is a reason to hold the other streams back.
            if isinstance(answer, NO_ANSWER) and not is_of_one_name(answer):
                raise unavailable(answer)
        return frozenset(stream for position, stream in asked if answers[position] == b"1")

    async def head(self, stream: str) -> StreamInfo | None:
        """Return the owner of a stream. None: there is no such stream, or no more."""
        names = ["team", "request", "gateway", "trace"]
        found: list[Any] = await answered(self._redis.hmget(keys.stream(stream), names))
        *fields, trace = found
        if None in fields:
            return None
        with reading():
            team, request, gateway = ((field or b"").decode() for field in fields)
            return StreamInfo(team, request, gateway, (trace or b"").decode())

    async def read(self, stream: str, after: int, num_batches: int) -> Page:
        """Return at most `num_batches` that follow an event; the first may begin before it."""
        log = keys.stream_log(stream)
        entries: Any = await answered(self._redis.xrange(log, min=f"({after}-0", count=num_batches))
        with reading():
            batches = tuple(_batch(id_, fields) for id_, fields in entries if b"end" not in fields)
        return Page(batches, len(batches) < len(entries))

    async def ended_by(self, stream: str, number: int) -> bool:
        """Return whether the stream has ended, with that event or before it."""
        entries: Any = await answered(self._redis.xrevrange(keys.stream_log(stream), count=1))
        with reading():
            return any(b"end" in fields and int(id_.partition(b"-")[0]) <= number for id_, fields in entries)

    async def has_ended(self, stream: str) -> bool:
        entries: Any = await answered(self._redis.xrevrange(keys.stream_log(stream), count=1))
        return any(b"end" in fields for _, fields in entries)

    async def sign(self, stream: str) -> None:
        """Tell the stream's gateway that somebody reads."""
        name = keys.stream_readers(stream)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.incr(name)
            pipeline.pexpire(name, round(keys.STREAM_READERS_TTL_S * 1000))
            await answered(pipeline.execute())

    async def signs(self, stream: str) -> bytes | None:
        """Return the count of signs, as text; another value than before means that somebody reads elsewhere."""
        found: Any = await answered(self._redis.get(keys.stream_readers(stream)))
        return found if isinstance(found, bytes) else None

    async def ask_to_end(self, stream: str) -> None:
        """Have the stream's gateway end it, at its next renewal."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hset(keys.stream(stream), "end", "1")
            # The stream may have just expired: a key that this makes anew must expire too.
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
    """Add the commands of a renewal; the last one's answer tells whether the stream is to end."""
    head, told = keys.stream(write.stream), write.head
    fields = {"team": told.team, "request": told.request, "gateway": told.gateway}
    pipeline.hset(head, mapping=fields | {"trace": told.trace} if told.trace else fields)
    pipeline.pexpire(head, ttl_ms)
    pipeline.pexpire(keys.stream_log(write.stream), ttl_ms)
    pipeline.hget(head, "end")


def _batch(id_: bytes, fields: dict[bytes, bytes]) -> Batch:
    return Batch(int(fields[b"first"]), int(id_.partition(b"-")[0]), fields[b"body"])


LEAST_BYTES = 4096
"""Bytes that a stream may keep however many others its team has."""


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The bounds of one team, over all gateways."""

    max_streams: int
    max_bytes: int

    def share(self, num_running: int) -> int:
        """Return the bytes that each of so many streams may keep."""
        return max(LEAST_BYTES, self.max_bytes // max(1, num_running))


class StreamBytes(NamedTuple):
    """The bytes of one stream that its team is charged for."""

    stream: str
    num_bytes: int
    state: Literal["running", "ended", "gone"]


class StreamCount(NamedTuple):
    num_running: int
    """Streams of the team that run, at all gateways."""
    made_room: tuple[str, ...]
    """Ids of ended streams that made room and are to be deleted now."""


class StreamQuota:
    """Bounds the number and bytes of a team's resumable streams, over all gateways."""

    def __init__(self, redis: redis.asyncio.Redis, bounds: StreamBounds, kept_s: float) -> None:
        """`kept_s`: seconds that a stream is kept after its end."""
        self.bounds = bounds
        self._lifetimes_ms = (round(keys.STREAM_TTL_S * 1000), round(kept_s * 1000))
        self._script = load_stream_script("count_streams")
        self._pipe = ScriptSender(redis, (self._script,), ANSWER_TIMEOUT_S)

    async def begin(self, team: str, stream: str) -> StreamCount | None:
        """Count a new stream in; None: the team runs as many as it may have."""
        return await self._count(team, "1", (StreamBytes(stream, 0, "running"),))

    async def note(self, team: str, held: Iterable[StreamBytes]) -> StreamCount:
        """Count the bytes of these streams. Call it every `keys.STREAM_RENEW_S` for those that run."""
        return await self._count(team, "", held) or StreamCount(0, ())

    async def _count(self, team: str, is_new: str, held: Iterable[StreamBytes]) -> StreamCount | None:
        bounds = (self.bounds.max_streams, self.bounds.max_bytes)
        told = [field for one in held for field in one]
        answer = await self._pipe.send(self._script, keys.streams(team), *bounds, *self._lifetimes_ms, is_new, *told)
        with reading():
            num_running, *made_room = answer
            return None if num_running < 0 else StreamCount(num_running, tuple(stream.decode() for stream in made_room))
