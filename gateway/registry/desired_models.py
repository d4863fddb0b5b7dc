"""Keeps in Redis which models should have workers, as operators decide; the supervisors of all machines read it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.outage import answered
from workers.protocol import keys
from workers.protocol.residency import LIFE_S


class DesiredModels:
    """Reads and writes which models should have workers. Nothing is cached, because only people ask, and seldom."""

    def __init__(self, redis: redis.asyncio.Redis) -> None:
        self._redis = redis

    async def is_supervised(self, model: str) -> bool:
        """Return whether a supervisor starts and stops the model's workers. Raises StoreUnavailable."""
        return bool(await answered(self._redis.exists(keys.supervised(model))))

    async def is_unloaded(self, model: str) -> bool:
        """Return whether the model's supervisors were last told to stop its workers. Raises StoreUnavailable."""
        return bool(await answered(self._redis.exists(keys.unloaded(model))))

    async def unloaded(self, models: Sequence[str]) -> frozenset[str]:
        """Return the models whose supervisors were last told to stop workers; no models while Redis does not answer."""
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for model in models:
                    pipeline.exists(keys.unloaded(model))
                found = await answered(pipeline.execute())
        except StoreUnavailable:
            return frozenset()
        return frozenset(model for model, is_unloaded in zip(models, found, strict=True) if is_unloaded)

    async def coming(self, models: Sequence[str]) -> frozenset[str]:
        """Return the models that a supervisor should keep workers for; no models while Redis does not answer."""
        if not models:
            return frozenset()
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for model in models:
                    pipeline.exists(keys.supervised(model))
                    pipeline.exists(keys.unloaded(model))
                found = iter(await answered(pipeline.execute()))
        except StoreUnavailable:
            return frozenset()
        return frozenset(
            model for model, kept, unloaded in zip(models, found, found, strict=True) if kept and not unloaded
        )

    async def want(self, model: str, wanted: bool) -> None:
        """Tell a model's supervisors to keep workers if `wanted`, otherwise to stop them. Raises StoreUnavailable."""
        if wanted:
            await answered(self._redis.delete(keys.unloaded(model)))
        else:
            await answered(self._redis.set(keys.unloaded(model), 1))

    async def ask_for(self, model: str) -> None:
        """Have a model that is loaded on demand loaded now, though no call waits for it. Raises StoreUnavailable."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.delete(keys.unloaded(model))
            pipeline.hset(keys.ASKED, model, f"{time.time():.3f}")
            await answered(pipeline.execute())

    async def send_away(self, model: str) -> None:
        """Have a model that is loaded on demand unloaded now. The mark stays only until supervisors have seen it
        (LIFE_S), or until a call waits for the model: that loads it again. Raises StoreUnavailable."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hdel(keys.ASKED, model)
            pipeline.set(keys.unloaded(model), 1, px=round(LIFE_S * 1000))
            await answered(pipeline.execute())
