"""What the operators of a fleet want of its LoRA adapters: files that were loaded at run time, and default scales.

Both stand in Redis, so that every gateway knows them and a worker that starts again gets what its forerunner had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from gateway.errors import StoreUnavailable
from gateway.store.cancellation import raise_if_cancelled
from workers.protocol import keys
from workers.protocol.adapters import LoadAdapter, decode_load

log = logging.getLogger(__name__)

REREAD_S = 1.0

_encode = msgspec.json.Encoder().encode


class AdapterWishes:
    """As Redis has them, at most `REREAD_S` old while Redis answers; the last known ones while it does not."""

    def __init__(self, redis: redis.asyncio.Redis, models: Callable[[], Iterable[str]]) -> None:
        """`models`: those to look for."""
        self._redis = redis
        self._models = models
        self._files: dict[str, dict[str, LoadAdapter]] = {}
        self._scales: dict[str, dict[str, float]] = {}
        self._away = False

    def files(self, model: str) -> Mapping[str, LoadAdapter]:
        return self._files.get(model, {})

    def scales(self, model: str) -> Mapping[str, float]:
        return self._scales.get(model, {})

    async def wants(self, model: str, name: str) -> bool:
        """Whether the adapter is wanted at this moment. Raises redis.RedisError."""
        return bool(await self._redis.hexists(keys.adapters(model), name))

    async def remember(self, model: str, asked: LoadAdapter) -> None:
        """Raises StoreUnavailable."""
        await self._written(self._redis.hset(keys.adapters(model), asked.name, _encode(asked)))
        self._files.setdefault(model, {})[asked.name] = asked

    async def forget(self, model: str, name: str) -> None:
        """The adapter and its scale. Raises StoreUnavailable."""
        await self._written(self._redis.hdel(keys.adapters(model), name))
        await self._written(self._redis.hdel(keys.adapter_scales(model), name))
        self._files.get(model, {}).pop(name, None)
        self._scales.get(model, {}).pop(name, None)

    async def set_scales(self, model: str, scales: Mapping[str, float]) -> None:
        """Adapters that are not named get 0. Raises StoreUnavailable."""
        wanted = {name: scale for name, scale in scales.items() if scale}
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(keys.adapter_scales(model))
            if wanted:
                pipeline.hset(keys.adapter_scales(model), mapping={name: str(wanted[name]) for name in wanted})
            await self._written(pipeline.execute())
        self._scales[model] = wanted

    async def refresh(self) -> None:
        """Raises redis.RedisError when Redis is away."""
        models = sorted(self._models())
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model in models:
                pipeline.hgetall(keys.adapters(model))
                pipeline.hgetall(keys.adapter_scales(model))
            answers = await pipeline.execute() if models else []
        self._files = {model: _files(found) for model, found in zip(models, answers[::2], strict=True)}
        self._scales = {model: _scales(found) for model, found in zip(models, answers[1::2], strict=True)}

    async def run(self) -> None:
        """Re-reads until cancelled."""
        while True:
            try:
                await self.refresh()
                self._away = False
            except (RedisError, OSError) as error:
                if not self._away:
                    log.warning("what is wanted of adapters can't be read (%s); keeping the last", type(error).__name__)
                self._away = True
            raise_if_cancelled()
            await asyncio.sleep(REREAD_S)

    async def _written(self, act: Any) -> None:
        try:
            await act
        except (RedisError, OSError) as error:
            message = f"Redis did not take the change ({type(error).__name__}). Send the request again."
            raise StoreUnavailable(message, retry_after_s=1.0) from error


def _files(found: Mapping[bytes, bytes]) -> dict[str, LoadAdapter]:
    files = {}
    for record in found.values():
        try:
            asked = decode_load(record)
        except msgspec.MsgspecError as error:
            log.warning("an adapter's record can't be read: %s", error)
            continue
        files[asked.name] = asked
    return files


def _scales(found: Mapping[bytes, bytes]) -> dict[str, float]:
    scales = {}
    for name, scale in found.items():
        try:
            scales[name.decode()] = float(scale)
        except ValueError as error:
            log.warning("an adapter's scale can't be read: %s", error)
    return scales
