"""Stores responses for later: per team, for a time, up to a number of bytes. Methods raise StoreUnavailable."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio

from gateway.store.client import ANSWER_TIMEOUT_S
from gateway.store.outage import answered
from gateway.store.scripts import ScriptSender, load_response_script
from workers.protocol import keys

NOT_YET = -1
"""Answer of the script when more of the oldest responses would have to make room than one run may drop."""


class ResponseRecords:
    def __init__(self, redis: redis.asyncio.Redis, ttl_s: float, bytes_per_team: int) -> None:
        self._redis = redis
        self._ttl_ms = round(ttl_s * 1000)
        self._bytes_per_team = bytes_per_team
        self._keep = load_response_script("keep_response")
        self._make_room = load_response_script("make_room_response")
        self._drop = load_response_script("drop_response")
        self._pipe = ScriptSender(redis, (self._keep, self._make_room, self._drop), ANSWER_TIMEOUT_S)

    async def keep(self, team: str, id: str, record: bytes, before: Sequence[str] = (), *, again: bool = False) -> bool:
        """Store a record, and keep the responses before it as long; the team's oldest ones make room.

        `again`: replace one that is there. False: that was dropped meanwhile, or the new one exceeds the team's bound.
        """
        rest = (id, record, self._ttl_ms, self._bytes_per_team, "1" if again else "", *before)
        prefix = keys.responses(team)
        while (kept := await self._pipe.send(self._keep, prefix, *rest)) == NOT_YET:
            # Sent without the record, which may be long; other callers' scripts run in between.
            while not await self._pipe.send(self._make_room, prefix, self._bytes_per_team - len(record)):
                pass
        return bool(kept)

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        """Return the bytes of each record, in the order of the ids; 0 where there is none, or none of this team."""
        if not ids:
            return []
        found = await answered(self._redis.hmget(keys.response_sizes(team), list(ids)))
        return [int(size) if isinstance(size, bytes) and size.isdigit() else 0 for size in found]

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        """Return the records in the order of the ids; None where there is none, or none of this team."""
        if not ids:
            return []
        found = await answered(self._redis.mget([keys.response(team, id_) for id_ in ids]))
        return [record if isinstance(record, bytes) else None for record in found]

    async def drop(self, team: str, id: str) -> bool:
        """Delete a record. Return whether it was there."""
        return bool(await self._pipe.send(self._drop, keys.responses(team), id))

    async def close(self) -> None:
        """Wait for the requests on their way."""
        await self._pipe.close()
