"""Stores responses of the model for later requests: by team, for a limited time, up to what each team may store.
Methods raise StoreUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import redis.asyncio

from accounts.protocol.records import TeamLimits
from gateway.store.client import ANSWER_TIMEOUT_S
from gateway.store.outage import answered
from gateway.store.scripts import ScriptSender, load_response_script
from workers.protocol import keys

NOT_YET = -1
"""Reply of the script `keep_response` if it has dropped all old responses that one run may, and still lacks room."""
ANY_NUMBER = 0
"""Argument of the scripts for a team whose responses are not limited in number."""


class ResponseRecords:
    def __init__(
        self, redis: redis.asyncio.Redis, ttl_s: float, bytes_per_team: int, limits_of: Callable[[str], TeamLimits]
    ) -> None:
        """`bytes_per_team`: maximum bytes of a team whose limits, which `limits_of` returns, name none."""
        self._redis = redis
        self._ttl_ms = round(ttl_s * 1000)
        self._bytes_per_team = bytes_per_team
        self._limits_of = limits_of
        self._keep = load_response_script("keep_response")
        self._make_room = load_response_script("make_room_response")
        self._drop = load_response_script("drop_response")
        self._pipe = ScriptSender(redis, (self._keep, self._make_room, self._drop), ANSWER_TIMEOUT_S)

    async def keep(self, team: str, id: str, record: bytes, before: Sequence[str] = (), *, again: bool = False) -> bool:
        """Store a response's record; if there is no room, the team's oldest responses are dropped. Return False if
        nothing was stored: the record is larger than the team's responses may be, or `again` is set and the old record
        was dropped meanwhile.

        `before`: ids of the earlier responses that this one follows; they are then kept as long as this one. `again`:
        replace the record that is stored under the same id."""
        limits, prefix = self._limits_of(team), keys.responses(team)
        max_bytes = self._bytes_per_team if limits.stored_response_bytes is None else limits.stored_response_bytes
        most = limits.stored_responses or ANY_NUMBER
        rest = (id, record, self._ttl_ms, max_bytes, most, "1" if again else "", *before)
        while (kept := await self._pipe.send(self._keep, prefix, *rest)) == NOT_YET:
            # Sent without the record, which may be long; other callers' scripts run in between.
            while not await self._pipe.send(self._make_room, prefix, max_bytes - len(record), most):
                pass
        return bool(kept)

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        """Return the bytes of each record, in the order of the ids; 0 if there is no such record, or it is another
        team's."""
        if not ids:
            return []
        found = await answered(self._redis.hmget(keys.response_sizes(team), list(ids)))
        return [int(size) if isinstance(size, bytes) and size.isdigit() else 0 for size in found]

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        """Return the records in the order of the ids; None if there is no such record, or it is another team's."""
        if not ids:
            return []
        found = await answered(self._redis.mget([keys.response(team, id_) for id_ in ids]))
        return [record if isinstance(record, bytes) else None for record in found]

    async def drop(self, team: str, id: str) -> bool:
        """Delete a record. Return whether it was there."""
        return bool(await self._pipe.send(self._drop, keys.responses(team), id))

    async def close(self) -> None:
        """Wait until every request that was sent to Redis has its answer."""
        await self._pipe.close()
