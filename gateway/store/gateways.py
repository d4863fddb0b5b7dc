"""The gateway processes on one Redis, as each of them tells."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import redis.asyncio

from gateway.store.scripts import load_beat_script
from workers.protocol import keys


@dataclass(frozen=True, slots=True)
class Gateways:
    """Those that live, as of one beat."""

    silent_s: Mapping[str, float]
    """Id -> how long ago it beat."""
    stayed: bool
    """This process was among them before, by its last beat."""


class GatewayBook:
    """Methods raise redis.RedisError and OSError."""

    def __init__(self, redis: redis.asyncio.Redis, gateway: str, ttl_s: float = keys.GATEWAY_TTL_S) -> None:
        self._redis = redis
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._beat = load_beat_script()

    async def beat(self) -> Gateways:
        """This process lives -> which others do."""
        told = await self._redis.eval(self._beat.source, 1, keys.GATEWAYS, self._gateway, self._ttl_s)
        await self._redis.set(keys.gateway(self._gateway), f"{time.time():.3f}", px=round(self._ttl_s * 1000))
        beats = told[1]
        silent_s = {id.decode(): ms / 1000 for id, ms in zip(beats[::2], beats[1::2], strict=True)}
        return Gateways(silent_s, bool(told[0]))

    async def leave(self) -> None:
        await self._redis.zrem(keys.GATEWAYS, self._gateway)
        await self._redis.delete(keys.gateway(self._gateway))
