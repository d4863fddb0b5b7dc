"""Which models an operator wants to have workers: said in Redis, heard by the supervisors of every machine."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.trouble import answered
from workers.protocol import keys


class ModelWishes:
    """Nothing is kept in memory: this is asked for by people."""

    def __init__(self, redis: redis.asyncio.Redis) -> None:
        self._redis = redis

    async def is_supervised(self, model: str) -> bool:
        """Whether a supervisor is there that starts and stops workers of the model. Raises StoreUnavailable."""
        return bool(await answered(self._redis.exists(keys.supervised(model))))

    async def is_unloaded(self, model: str) -> bool:
        """Whether its supervisors were last told to stop its workers. Raises StoreUnavailable."""
        return bool(await answered(self._redis.exists(keys.unloaded(model))))

    async def unloaded(self, models: Sequence[str]) -> frozenset[str]:
        """Those whose supervisors were last told to stop their workers; none of them while Redis does not answer."""
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for model in models:
                    pipeline.exists(keys.unloaded(model))
                found = await answered(pipeline.execute())
        except StoreUnavailable:
            return frozenset()
        return frozenset(model for model, is_unloaded in zip(models, found, strict=True) if is_unloaded)

    async def coming(self, models: Sequence[str]) -> frozenset[str]:
        """Those whose supervisors are to keep workers; none of them while Redis does not answer."""
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
        """Raises StoreUnavailable."""
        if wanted:
            await answered(self._redis.delete(keys.unloaded(model)))
        else:
            await answered(self._redis.set(keys.unloaded(model), 1))
