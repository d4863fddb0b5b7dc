"""A worker's place in Redis: its heartbeat, and a word on the fleet's channel when something changes.

Serving does not depend on any of it: while Redis is away the worker goes on, and is back in the fleet with the first
beat that gets through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from workers import redis_link
from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, Heartbeat, decode_heartbeat, record_of

REDIS_TIMEOUT_S = 1.0
"""For connecting, and for one answer: below the heartbeat's lifetime, so that a slow Redis is noticed in time."""

logger = logging.getLogger(__name__)


def connect(url: str) -> Redis:
    """A client that fails fast and does not retry by itself: the next beat is the retry. Raises BadRedisUrl."""
    return redis_link.connect(url, timeout_s=REDIS_TIMEOUT_S, retries=0)


class Registration:
    """Keeps one worker's record alive. `read` gives the present heartbeat, on the loop and without blocking."""

    def __init__(self, redis: Redis, read: Callable[[], Heartbeat]) -> None:
        self._redis = redis
        self._read = read
        self._hurry = asyncio.Event()
        self._announced: tuple[bool, tuple[str, ...]] | None = None
        """What the fleet was last told: nothing, or whether the worker drains and which adapters it has."""
        self.registered = asyncio.Event()
        """Set once the first beat has got through."""

    def hurry(self) -> None:
        """Something changed that the fleet should know now."""
        self._hurry.set()

    async def run(self) -> None:
        """Beats until cancelled."""
        this = asyncio.current_task()
        # Asked each round: redis-py can swallow a cancellation before Python 3.12 (python/cpython#86296).
        while this is None or not this.cancelling():
            self._hurry.clear()
            try:
                await self._beat()
            except (RedisError, OSError) as error:
                if self._announced is not None:
                    logger.warning(
                        "Redis does not answer (%s); serving goes on, registering again when it is back", error
                    )
                self._announced = None
            try:
                async with asyncio.timeout(keys.HEARTBEAT_INTERVAL_S):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """Takes the record away, unless a successor in the same place has written its own."""
        mine = self._read()
        name = keys.worker(mine.model, mine.worker)
        try:
            async with asyncio.timeout(2 * REDIS_TIMEOUT_S):
                record = await self._redis.hget(name, BEAT)
                if record is not None and decode_heartbeat(record).boot == mine.boot:
                    await self._redis.delete(name)
                await self._redis.publish(keys.FLEET_CHANNEL, name)
        except (RedisError, OSError) as error:
            logger.warning("could not take the record %s out of Redis (%s); it expires by itself", name, error)

    async def _beat(self) -> None:
        heartbeat = self._read()
        name = keys.worker(heartbeat.model, heartbeat.worker)
        news = heartbeat.draining, heartbeat.adapters
        # No transaction: `pd:models` lies elsewhere on a Cluster, and what a broken one leaves the next beat completes.
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(name, mapping=dict(record_of(heartbeat)))
            pipe.pexpire(name, int(keys.HEARTBEAT_TTL_S * 1000))
            pipe.sadd(keys.workers(heartbeat.model), heartbeat.worker)
            pipe.sadd(keys.MODELS, heartbeat.model)
            if news != self._announced:
                pipe.publish(keys.FLEET_CHANNEL, name)
            await pipe.execute()
        if self._announced is None:
            logger.info("registered as %s", name)
        self._announced = news
        self.registered.set()
