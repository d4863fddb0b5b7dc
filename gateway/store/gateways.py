"""The heartbeats of the gateway processes on one Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import ResponseError

from gateway.store.scripts import load_beat_script
from gateway.store.trouble import is_of_one_name
from gateway.store.unreadable import Unreadable
from workers.protocol import keys
from workers.protocol.metrics.of_gateway import Unread


@dataclass(frozen=True, slots=True)
class Gateways:
    """The live gateways, as of one heartbeat of this one."""

    silent_s: Mapping[str, float]
    """Id -> seconds since its heartbeat."""
    stayed: bool
    """Whether this process was still on the list by its last heartbeat."""


class GatewayBook:
    """Writes this gateway's heartbeat and reads those of others. Methods raise redis.RedisError and OSError."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        gateway: str,
        ttl_s: float = keys.GATEWAY_TTL_S,
        unreadable: Unreadable | None = None,
    ) -> None:
        """`unreadable` is told of ids that are no text."""
        self._unreadable = unreadable or Unreadable()
        self._redis = redis
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._beat = load_beat_script()

    async def beat(self) -> Gateways | None:
        """Write this process's heartbeat and return the live gateways; None where the list's key has another type."""
        await self._redis.set(keys.gateway(self._gateway), f"{time.time():.3f}", px=round(self._ttl_s * 1000))
        try:
            told = await self._redis.eval(self._beat.source, 1, keys.GATEWAYS, self._gateway, self._ttl_s)
        except ResponseError as error:
            if not is_of_one_name(error):
                raise
            self._unreadable.skip(Unread.GATEWAYS, keys.GATEWAYS, error)
            return None
        silent_s: dict[str, float] = {}
        for id, ms in zip(told[1][::2], told[1][1::2], strict=True):
            try:
                silent_s[id.decode()] = ms / 1000
            except ValueError as error:
                self._unreadable.skip(Unread.GATEWAYS, id, error)
        return Gateways(silent_s, bool(told[0]))

    async def leave(self) -> None:
        await self._redis.zrem(keys.GATEWAYS, self._gateway)
        await self._redis.delete(keys.gateway(self._gateway))
