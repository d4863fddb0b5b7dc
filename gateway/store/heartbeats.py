"""Writes and reads the heartbeats of the gateway processes on one Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import RedisError

from gateway.store.outage import Unreadable, is_of_one_name
from gateway.store.scripts import load_beat_script
from gateway.telemetry.metrics import Unread
from workers.protocol import keys
from workers.redis.link import short_commands_of


@dataclass(frozen=True, slots=True)
class Gateways:
    """The gateways that are alive, as read from Redis when this gateway wrote its heartbeat."""

    silent_s: Mapping[str, float]
    """Id of a gateway -> seconds since its heartbeat."""
    stayed: bool
    """Whether this gateway still counted as alive; False: its heartbeat before this one had expired."""


class GatewayHeartbeats:
    """Writes this gateway's heartbeat and reads those of other gateways. Methods raise redis.RedisError and OSError."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        gateway: str,
        ttl_s: float = keys.GATEWAY_TTL_S,
        unreadable: Unreadable | None = None,
    ) -> None:
        """`unreadable` counts and logs gateway ids that are not text."""
        self._unreadable = unreadable or Unreadable()
        self._redis = redis
        self._commands = short_commands_of(redis)
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._beat = load_beat_script()

    async def beat(self) -> Gateways | None:
        """Write this process's heartbeat and return the live gateways; None if the Redis key that lists the gateways
        holds a value of the wrong type."""
        set_, told = await self._commands.ask(
            ("SET", keys.gateway(self._gateway), f"{time.time():.3f}", "PX", round(self._ttl_s * 1000)),
            ("EVAL", self._beat.source, 1, keys.GATEWAYS, self._gateway, self._ttl_s),
        )
        for answer in (set_, told):
            if isinstance(answer, RedisError) and not (answer is told and is_of_one_name(answer)):
                raise answer
        if isinstance(told, RedisError):
            self._unreadable.skip(Unread.GATEWAYS, keys.GATEWAYS, told)
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
