"""Bounds the number and bytes of a team's resumable streams, over all gateways. Methods raise StoreUnavailable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import redis.asyncio

from gateway.store.client import ANSWER_TIMEOUT_S
from gateway.store.pipe import Pipe
from gateway.store.scripts import load_stream_script
from gateway.store.trouble import reading
from workers.protocol import keys

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


class Held(NamedTuple):
    """The bytes of one stream that its team is charged for."""

    stream: str
    num_bytes: int
    state: Literal["running", "ended", "gone"]


class Count(NamedTuple):
    num_running: int
    """Streams of the team that run, at all gateways."""
    made_room: tuple[str, ...]
    """Ids of ended streams that made room and are to be deleted now."""


class StreamQuota:
    def __init__(self, redis: redis.asyncio.Redis, bounds: StreamBounds, kept_s: float) -> None:
        """`kept_s`: seconds that a stream is kept after its end."""
        self.bounds = bounds
        self._lifetimes_ms = (round(keys.STREAM_TTL_S * 1000), round(kept_s * 1000))
        self._script = load_stream_script("count_streams")
        self._pipe = Pipe(redis, (self._script,), ANSWER_TIMEOUT_S)

    async def begin(self, team: str, stream: str) -> Count | None:
        """Count a new stream in; None: the team runs as many as it may have."""
        return await self._count(team, "1", (Held(stream, 0, "running"),))

    async def note(self, team: str, held: Iterable[Held]) -> Count:
        """Count the bytes of these streams. Call it every `keys.STREAM_RENEW_S` for those that run."""
        return await self._count(team, "", held) or Count(0, ())

    async def _count(self, team: str, is_new: str, held: Iterable[Held]) -> Count | None:
        bounds = (self.bounds.max_streams, self.bounds.max_bytes)
        told = [field for one in held for field in one]
        answer = await self._pipe.send(self._script, keys.streams(team), *bounds, *self._lifetimes_ms, is_new, *told)
        with reading():
            num_running, *made_room = answer
            return None if num_running < 0 else Count(num_running, tuple(stream.decode() for stream in made_room))
