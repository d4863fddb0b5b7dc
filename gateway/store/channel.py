"""Follows one pub/sub channel, and writes and reads the heartbeats of the gateway processes on one Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import ConnectionError, RedisError

from gateway.store.outage import Unreadable, is_of_one_name, raise_if_cancelled
from gateway.store.scripts import load_beat_script
from gateway.telemetry.metrics import Unread
from workers.protocol import keys
from workers.redis.link import short_commands_of

log = logging.getLogger(__name__)

RETRY_S = 0.2
SILENCE_S = 2.0
"""Seconds without a message after which Redis is pinged; if it does not reply within as many seconds again, the
connection counts as lost."""


async def follow(
    redis: redis.asyncio.Redis, channel: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[], None]
) -> None:
    """Call `on_message` with each message of the channel. Call `on_subscribed` after each subscription, since messages
    sent before it may have been missed. Never returns. A lost connection is logged once; then a new one is tried every
    RETRY_S until one can be made."""
    away = False
    while True:
        pubsub = redis.pubsub()
        try:
            await pubsub.subscribe(channel)
            asked = False
            while True:
                raise_if_cancelled()
                message = await pubsub.get_message(timeout=SILENCE_S)
                if message is None:
                    if asked:
                        raise ConnectionError(f"no answer to a ping in {SILENCE_S:g} s")
                    await pubsub.ping()
                    asked = True
                    continue
                asked = False
                if message["type"] == "message":
                    on_message(message["data"])
                elif message["type"] == "subscribe":
                    if away:
                        log.info("following %s again", channel)
                    away = False
                    on_subscribed()
        except (RedisError, OSError) as error:
            if not away:
                log.warning("lost %s (%s: %s); trying again until it is back", channel, type(error).__name__, error)
            away = True
        finally:
            with suppress(RedisError, OSError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]
        raise_if_cancelled()
        await asyncio.sleep(RETRY_S)


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
