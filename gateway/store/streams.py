"""Keeps resumable streams in Redis: events, owners and ends, signs that somebody reads them, and each team's quota.

Events are numbered from 1. One gateway writes a stream, any gateway reads it. Methods raise StoreUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import redis.asyncio

from accounts.protocol.records import TeamLimits
from gateway.store.client import ANSWER_TIMEOUT_S
from gateway.store.outage import NO_ANSWER, answered, is_of_one_name, reading, unavailable
from gateway.store.scripts import LONG_BYTES, ScriptSender, load_stream_script
from workers.protocol import keys
from workers.redis.link import long_commands_of, short_commands_of
from workers.redis.short_commands import Command

COMMANDS_BYTES = 512
"""Approximate bytes of a stream's commands on top of its events."""
NUM_RENEWING = 4
"""Number of commands that renew a stream."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The owner, request and writer of a stream."""

    team: str
    request: str
    """Digest of the request that the stream answers; empty: any request of the team may read it."""
    gateway: str
    """Id of the gateway that writes the stream."""
    trace: str = ""
    """The `traceparent` of the span within which the stream's answer is made; empty: it has no trace."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The events that have the numbers `first` to `last`, as the bytes that clients get."""

    first: int
    last: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """The new events and the state of one stream, to be written to Redis."""

    stream: str
    head: StreamInfo
    batch: Batch | None
    keep_from: int
    """Number of the oldest event that is still kept."""
    ended: bool
    last: int
    """Number of the newest event."""
    renew: bool = True
    """Whether to renew the stream's lifetime, and to ask whether somebody wants the stream ended. False: only add new
    events."""
    is_first: bool = False
    """Whether Redis has nothing of the stream, or must forget what it has: the batch is the first one that is kept."""


class RenewedStreams(NamedTuple):
    """The outcome of renewing streams: the ids of those that are to end, and of those that Redis had lost."""

    unwanted: frozenset[str]
    """Streams that somebody wants ended."""
    lost: frozenset[str]
    """Streams of which Redis had lost what it had: it was emptied, or their lifetime had passed."""


@dataclass(frozen=True, slots=True)
class Page:
    batches: tuple[Batch, ...]
    ended: bool
    """Whether the stream ends with these batches."""


class StreamLog:
    def __init__(self, redis: redis.asyncio.Redis, kept_s: float, running_s: float = keys.STREAM_TTL_S) -> None:
        """`kept_s`: seconds that a stream is kept after its end; `running_s`: seconds that it is kept without a
        renewal."""
        self._redis = redis
        self._short_commands = short_commands_of(redis)
        self._long_commands = long_commands_of(redis)
        self._kept_ms = round(kept_s * 1000)
        self._running_ms = round(running_s * 1000)

    async def write(self, writes: Sequence[Write]) -> RenewedStreams:
        """Write new events and states of streams; writing the same again changes nothing."""
        unwanted, lost = list[str](), list[str]()
        for batch in _batches(writes):
            commands: list[Command] = []
            renewed: list[tuple[int, Write]] = []
            for write in batch:
                commands += _adding(write)
                if write.renew:
                    commands += _renewing(write, self._kept_ms if write.ended else self._running_ms)
                    renewed.append((len(commands), write))
            is_long = _num_bytes(batch[0]) > LONG_BYTES
            answers = await answered((self._long_commands if is_long else self._short_commands).ask(*commands))
            for answer in answers:
                # Events that were added before a connection broke are refused the second time, and a key of another
                # type can't be written: neither is a reason to hold the other streams back.
                if isinstance(answer, NO_ANSWER) and not is_of_one_name(answer):
                    raise unavailable(answer)
            for end, write in renewed:
                num_new, _, _, wish = answers[end - NUM_RENEWING : end]
                if wish == b"1":
                    unwanted.append(write.stream)
                if isinstance(num_new, int) and num_new and not write.is_first:
                    lost.append(write.stream)
        return RenewedStreams(frozenset(unwanted), frozenset(lost))

    async def head(self, stream: str) -> StreamInfo | None:
        """Return the owner, request and writer of a stream; None if there is no such stream, or no longer."""
        names = ["team", "request", "gateway", "trace"]
        found: list[Any] = await answered(self._redis.hmget(keys.stream(stream), names))
        *fields, trace = found
        if None in fields:
            return None
        with reading():
            team, request, gateway = ((field or b"").decode() for field in fields)
            return StreamInfo(team, request, gateway, (trace or b"").decode())

    async def read(self, stream: str, after: int, num_batches: int) -> Page:
        """Return at most `num_batches` batches of the events whose numbers are above `after`. The first batch may begin
        with earlier events."""
        log = keys.stream_log(stream)
        entries: Any = await answered(self._redis.xrange(log, min=f"({after}-0", count=num_batches))
        with reading():
            batches = tuple(_batch(id_, fields) for id_, fields in entries if b"end" not in fields)
        return Page(batches, len(batches) < len(entries))

    async def ended_by(self, stream: str, number: int) -> bool:
        """Return whether the stream has ended and has no events after this number."""
        entries: Any = await answered(self._redis.xrevrange(keys.stream_log(stream), count=1))
        with reading():
            return any(b"end" in fields and int(id_.partition(b"-")[0]) <= number for id_, fields in entries)

    async def has_ended(self, stream: str) -> bool:
        entries: Any = await answered(self._redis.xrevrange(keys.stream_log(stream), count=1))
        return any(b"end" in fields for _, fields in entries)

    async def sign(self, stream: str) -> None:
        """Give the stream's gateway a sign that somebody reads the stream."""
        name = keys.stream_readers(stream)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.incr(name)
            pipeline.pexpire(name, round(keys.STREAM_READERS_TTL_S * 1000))
            await answered(pipeline.execute())

    async def signs(self, stream: str) -> bytes | None:
        """Return the number of signs so far, as text; if it changes, somebody reads the stream at another gateway."""
        found: Any = await answered(self._redis.get(keys.stream_readers(stream)))
        return found if isinstance(found, bytes) else None

    async def ask_to_end(self, stream: str) -> None:
        """Ask the stream's gateway to end the stream; it does so at its next renewal."""
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


def _batches(writes: Sequence[Write]) -> Iterator[list[Write]]:
    """Yield writes to send together: of LONG_BYTES in all, or one that is longer alone."""
    batch: list[Write] = []
    num_bytes = 0
    for write in writes:
        more = _num_bytes(write)
        if batch and num_bytes + more > LONG_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(write)
        num_bytes += more
    if batch:
        yield batch


def _num_bytes(write: Write) -> int:
    return COMMANDS_BYTES + (0 if write.batch is None else len(write.batch.body))


def _adding(write: Write) -> Iterator[Command]:
    """Yield the commands that add a stream's new events, and drop those that are not kept any more."""
    log, batch = keys.stream_log(write.stream), write.batch
    if write.is_first:
        yield "DEL", log
    if batch is not None:
        yield "XADD", log, f"{batch.last}-0", "first", batch.first, "body", batch.body
    if write.ended:
        yield "XADD", log, f"{write.last}-1", "end", "1"
    if write.keep_from > 1:
        yield "XTRIM", log, "MINID", f"{write.keep_from}-0"


def _renewing(write: Write, ttl_ms: int) -> Iterator[Command]:
    """Yield the commands that renew a stream. The first one's answer is how many fields the stream did not have, the
    last one's whether somebody wants the stream ended."""
    head, told = keys.stream(write.stream), write.head
    trace = ("trace", told.trace) if told.trace else ()
    yield "HSET", head, "team", told.team, "request", told.request, "gateway", told.gateway, *trace
    yield "PEXPIRE", head, ttl_ms
    yield "PEXPIRE", keys.stream_log(write.stream), ttl_ms
    yield "HGET", head, "end"


def _batch(id_: bytes, fields: dict[bytes, bytes]) -> Batch:
    return Batch(int(fields[b"first"]), int(id_.partition(b"-")[0]), fields[b"body"])


LEAST_BYTES = 4096
"""Bytes that a stream may always keep, however many other streams its team has."""


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The limits of one team's streams, over all gateways."""

    max_streams: int
    max_bytes: int
    streams_limit: str = "setting `resume_streams_per_team`"
    """The name of what sets `max_streams`, for callers."""

    def share(self, num_running: int) -> int:
        """Return the bytes that each stream may keep if `num_running` streams run."""
        return max(LEAST_BYTES, self.max_bytes // max(1, num_running))

    def within(self, limits: TeamLimits) -> StreamBounds:
        """Return the bounds of a team, whose own limits replace these."""
        of_team = {"max_streams": limits.resumable_streams, "max_bytes": limits.resumable_stream_bytes}
        replaced: dict[str, Any] = {name: most for name, most in of_team.items() if most is not None}
        if limits.resumable_streams is not None:
            replaced["streams_limit"] = "limit `resumable_streams` of the team or its organisation"
        return replace(self, **replaced)


class StreamBytes(NamedTuple):
    """The bytes of one stream, which its team is charged for."""

    stream: str
    num_bytes: int
    state: Literal["running", "ended", "gone"]


class StreamCount(NamedTuple):
    num_running: int
    """Number of the team's streams that run, at all gateways."""
    made_room: tuple[str, ...]
    """Ids of ended streams that were taken off the team's count to make room; they must be deleted now."""


class StreamQuota:
    """Limits the number and bytes of a team's resumable streams, over all gateways."""

    def __init__(
        self, redis: redis.asyncio.Redis, bounds: StreamBounds, kept_s: float, limits_of: Callable[[str], TeamLimits]
    ) -> None:
        """`bounds`: those of a team whose limits, which `limits_of` returns, name none. `kept_s`: seconds that a stream
        is kept after its end."""
        self._bounds = bounds
        self._limits_of = limits_of
        self._lifetimes_ms = (round(keys.STREAM_TTL_S * 1000), round(kept_s * 1000))
        self._script = load_stream_script("count_streams")
        self._pipe = ScriptSender(redis, (self._script,), ANSWER_TIMEOUT_S)

    def bounds_of(self, team: str) -> StreamBounds:
        """Return the bounds of the team's streams, as they are now."""
        return self._bounds.within(self._limits_of(team))

    async def begin(self, team: str, stream: str) -> StreamCount | None:
        """Count a new stream as the team's. Return None, and do not count it, if the team may run no more streams."""
        return await self._count(team, "1", (StreamBytes(stream, 0, "running"),))

    async def note(self, team: str, held: Iterable[StreamBytes]) -> StreamCount:
        """Count the bytes of these streams as the team's. Call it every `keys.STREAM_RENEW_S` for streams that run."""
        return await self._count(team, "", held) or StreamCount(0, ())

    async def _count(self, team: str, is_new: str, held: Iterable[StreamBytes]) -> StreamCount | None:
        told, bounds = [field for one in held for field in one], self.bounds_of(team)
        most = (bounds.max_streams, bounds.max_bytes)
        answer = await self._pipe.send(self._script, keys.streams(team), *most, *self._lifetimes_ms, is_new, *told)
        with reading():
            num_running, *made_room = answer
            return None if num_running < 0 else StreamCount(num_running, tuple(stream.decode() for stream in made_room))
