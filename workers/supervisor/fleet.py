"""Tells the fleet through Redis which models are supervised; removes a dead worker's record before it expires."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from workers.planner.bounded_reads import LONGEST_ANSWER
from workers.protocol import keys
from workers.redis import link
from workers.redis.trouble import NOT_TRIED
from workers.sources import masked

TIMEOUT_S = 1.0
REACHABLE_S = 10.0
POLL_S = 0.02


log = logging.getLogger(__name__)


class NoRedis(RuntimeError):
    """There is no Redis that can be used; the message says why, and the remedy."""


class Fleet:
    """The workers' records in Redis. Owns its connection; close it with `aclose`."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        # The caller decides whether to try again.
        self._client = link.connect(redis_url, timeout_s=TIMEOUT_S, retries=0, longest_bytes=LONGEST_ANSWER)
        self._is_refused = False
        """Whether the log has been told that this login lacks rights."""

    @property
    def client(self) -> redis.asyncio.Redis:
        """The connection, for what machines tell each other."""
        return self._client

    async def forget(self, model: str, worker_id: str) -> None:
        """Remove a dead worker's heartbeat and wake the gateways. Best effort: without Redis the record expires."""
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                record = keys.worker(model, worker_id)
                await self._client.delete(record)
                await self._client.publish(keys.FLEET_CHANNEL, record)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("could not tell the fleet that %s is gone: %s", worker_id, error)

    async def wait_until_reachable(
        self, timeout_s: float = REACHABLE_S, waiting: Callable[[str], None] = lambda line: None
    ) -> None:
        """Wait until Redis answers PING. `waiting` is told once that it does not yet. Raises NoRedis after `timeout_s`
        seconds."""
        deadline, is_told = time.monotonic() + timeout_s, False
        where = masked("redis_url", self._url)
        while True:
            try:
                await self._client.ping()
                return
            except (RedisError, OSError) as error:
                why = str(error).removeprefix(NOT_TRIED)
                if time.monotonic() > deadline:
                    raise NoRedis(
                        f"no Redis at {where} after {timeout_s:g} s ({why}); start it, or check --redis-url"
                    ) from None
                if not is_told:
                    waiting(f"Redis does not answer yet ({why}); waiting up to {timeout_s:g} s (redis_wait_s)")
                is_told = True
            await asyncio.sleep(POLL_S)

    async def present(self, workers: Mapping[str, str]) -> list[str]:
        """Return the ids of those `workers` (id -> model) that Redis has a record of; none if it does not answer."""
        try:
            return [
                worker_id
                for worker_id, model in workers.items()
                if await self._client.exists(keys.worker(model, worker_id))
            ]
        except (RedisError, OSError):
            return []

    async def unloaded(self, models: Sequence[str], *, forget: bool) -> frozenset[str] | None:
        """Return those of `models` that an admin has unloaded; None: Redis does not answer. Also renew the mark in
        Redis that each of `models` is supervised. `forget`: delete the "unloaded" marks, and return an empty set."""
        names = [keys.unloaded(model) for model in models]
        try:
            async with asyncio.timeout(2 * TIMEOUT_S), self._client.pipeline(transaction=False) as pipeline:
                for model in models:
                    pipeline.set(keys.supervised(model), 1, px=int(keys.SUPERVISED_TTL_S * 1000))
                for name in names:
                    pipeline.delete(name) if forget else pipeline.exists(name)
                answers = await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            self._note_refusal(error)
            return None
        found = zip(models, answers[len(models) :], strict=True)
        return frozenset() if forget else frozenset(model for model, is_there in found if is_there)

    def _note_refusal(self, error: Exception) -> None:
        """Log, once, that this login may not do what supervisors do."""
        if isinstance(error, NoPermissionError) and not self._is_refused:
            self._is_refused = True
            log.error(
                "Redis refuses what this supervisor asks (%s): workers are neither loaded nor unloaded; log in as %s, "
                "and give --worker-redis-url for its workers (`paddock redis acl`, docs/redis.md)",
                error,
                keys.user_of("supervisor"),
            )

    async def aclose(self) -> None:
        await self._client.aclose()
