"""The gateway processes on one Redis, as each of them tells."""

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
    """Those that live, as of one beat."""

    silent_s: Mapping[str, float]
    """Id -> how long ago it beat."""
    stayed: bool
    """This process was among them before, by its last beat."""


class GatewayBook:
    """Methods raise redis.RedisError and OSError."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        gateway: str,
        ttl_s: float = keys.GATEWAY_TTL_S,
        unreadable: Unreadable | None = None,
    ) -> None:
        """`unreadable` hears of names that are none."""
        self._unreadable = unreadable or Unreadable()
        self._redis = redis
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._beat = load_beat_script()

    async def beat(self) -> Gateways | None:
        """This process lives -> which others do; None where something else lies under the name that lists them."""
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
