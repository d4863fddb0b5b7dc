"""The LoRA adapters that operators have registered for each model, and the default scales of the adapters.

Redis stores both, so that all gateways agree, and a worker that starts later gets the same adapters as the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import redis.asyncio
from msgspec import Meta

from gateway.adapters.names import NOTHING, Contents
from gateway.store.outage import NO_ANSWER, Outage, Unreadable, answered, is_of_one_name, raise_if_cancelled
from gateway.telemetry.metrics import Unread
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.protocol.queries import LoadAdapter
from workers.protocol.requests import Name
from workers.redis.link import long_commands_of
from workers.redis.short_commands import Command, fields_of

log = logging.getLogger(__name__)

REREAD_S = keys.NEWS_INTERVAL_S

REMOVED_TTL_S = 24 * 3600
"""Seconds that Redis remembers a removed adapter. A worker that was out of reach for longer can bring it back."""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A registered adapter: every worker of its model should load it."""

    name: Name
    base: str
    """Name of the base model."""
    path: str
    """Path of the adapter's file, relative to the workers' `adapters_dir`."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Hash of the file's contents, as computed by the first worker that checked it."""
    pinned: bool = False

    def ask(self, *, check: bool = False) -> LoadAdapter:
        """Return the request that makes a worker load the adapter; `check`: only check its file."""
        return LoadAdapter(name=self.name, path=self.path, pinned=self.pinned, sha256=self.sha256, check=check)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AdapterRecord).decode


@dataclass(frozen=True, slots=True)
class _Known:
    """The registered adapters and scales of one model, as last read from Redis."""

    records: Mapping[str, AdapterRecord] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    scales: Mapping[str, float] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)


_NOTHING = _Known()


def no_scales() -> Mapping[str, Mapping[str, float]]:
    """Return no scales: the default `defaults` of `DesiredAdapters`."""
    return {}


class DesiredAdapters:
    """The registered adapters and scales of all models, read from Redis every `REREAD_S` seconds. While Redis is away,
    the last known values stay."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        models: Callable[[], Iterable[str]],
        unreadable: Unreadable | None = None,
        defaults: Callable[[], Mapping[str, Mapping[str, float]]] = no_scales,
    ) -> None:
        """`models` returns the models to read; `unreadable` counts values that can't be read. `defaults` returns
        model -> the catalog's scales, used for adapters whose scale nobody has set."""
        self._defaults = defaults
        self._unreadable = unreadable or Unreadable()
        self._redis = redis
        self._commands = long_commands_of(redis)
        self._models = models
        self._known: dict[str, _Known] = {}
        self._num_changes: Counter[str] = Counter()
        """Model -> changes made by this gateway. If it makes one while it reads from Redis, what it read is dropped."""

    @property
    def models(self) -> list[str]:
        """The models whose adapters have been read from Redis."""
        return list(self._known)

    def records(self, model: str) -> Mapping[str, AdapterRecord]:
        """Return the model's registered adapters, by name."""
        return self._known.get(model, _NOTHING).records

    def removed(self, model: str) -> frozenset[str]:
        """Return the names of the model's adapters that were removed within REMOVED_TTL_S."""
        return self._known.get(model, _NOTHING).removed

    def scales(self, model: str) -> Mapping[str, float]:
        """Return adapter -> scale for calls to the model that name no adapters."""
        own, known = self._defaults().get(model, {}), self._known.get(model, _NOTHING).scales
        return {**own, **known} if own else known

    def contents(self) -> Mapping[str, Contents]:
        """Return for each model: registered adapter -> SHA-256 of its file. Models without adapters are left out."""
        return {model: known.contents for model, known in self._known.items() if known.contents}

    async def is_registered(self, record: AdapterRecord) -> bool:
        """Return whether exactly this record is in Redis now. Raises redis.RedisError."""
        found = await self._redis.hget(keys.adapters(record.base), record.name)
        return found == _encode(record)

    async def is_removed(self, model: str, name: str) -> bool:
        """Ask Redis whether the adapter was removed within REMOVED_TTL_S. Raises redis.RedisError."""
        return bool(await self._redis.hexists(keys.adapters_removed(model), name))

    async def register(self, record: AdapterRecord) -> None:
        """Register an adapter. Raises StoreUnavailable."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(keys.adapters(record.base), record.name, _encode(record))
            pipeline.hdel(keys.adapters_removed(record.base), record.name)
            await answered(pipeline.execute())
        known = self._known.get(record.base, _NOTHING)
        self._num_changes[record.base] += 1
        self._note(record.base, {**known.records, record.name: record}, known.removed - {record.name}, known.scales)

    async def adopt(self, record: AdapterRecord) -> bool:
        """Register an adapter that a worker has, unless it is registered or was removed. Return whether it is new in
        Redis.

        Raises redis.RedisError."""
        if await self.is_removed(record.base, record.name):
            return False
        return bool(await self._redis.hsetnx(keys.adapters(record.base), record.name, _encode(record)))

    async def unregister(self, model: str, name: str) -> None:
        """Remove an adapter and its scale, so that workers unload it. Raises StoreUnavailable."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(keys.adapters_removed(model), name, str(time.time()))
            pipeline.expire(keys.adapters_removed(model), REMOVED_TTL_S)
            pipeline.hdel(keys.adapters(model), name)
            pipeline.hdel(keys.adapter_scales(model), name)
            await answered(pipeline.execute())
        known = self._known.get(model, _NOTHING)
        records = {other: record for other, record in known.records.items() if other != name}
        scales = {other: scale for other, scale in known.scales.items() if other != name}
        self._num_changes[model] += 1
        self._note(model, records, known.removed | {name}, scales)

    async def set_scales(self, model: str, scales: Mapping[str, float]) -> None:
        """Set a model's default scales; adapters that are not named get 0. Raises StoreUnavailable."""
        own = self._defaults().get(model, {})
        wanted = {**dict.fromkeys(own, 0.0), **{name: scale for name, scale in scales.items() if scale or name in own}}
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(keys.adapter_scales(model))
            if wanted:
                pipeline.hset(keys.adapter_scales(model), mapping={name: str(wanted[name]) for name in wanted})
            await answered(pipeline.execute())
        known = self._known.get(model, _NOTHING)
        self._num_changes[model] += 1
        self._note(model, known.records, known.removed, wanted)

    async def refresh(self) -> None:
        """Read the registered adapters and scales of all models once. Raises redis.RedisError if Redis is away."""
        models = sorted(self._models())
        num_changes = self._num_changes.copy()
        asked: list[Command] = []
        for model in models:
            asked += ("HGETALL", keys.adapters(model)), ("HKEYS", keys.adapters_removed(model))
            asked.append(("HGETALL", keys.adapter_scales(model)))
        answers = await self._commands.ask(*asked) if asked else []
        before, self._known = self._known, {}
        for model, records, removed, scales in zip(models, answers[::3], answers[1::3], answers[2::3], strict=True):
            known = before.get(model, _NOTHING)
            if self._num_changes[model] != num_changes[model]:
                self._known[model] = known
                continue
            self._note(
                model,
                known.records if self._is_other(Unread.ADAPTERS, model, records) else self._records(model, records),
                known.removed if self._is_other(Unread.REMOVED, model, removed) else self._removed(model, removed),
                known.scales if self._is_other(Unread.SCALES, model, scales) else self._scales(model, scales),
            )

    async def run(self) -> None:
        """Refresh every REREAD_S seconds until cancelled."""
        what = "what is wanted of adapters can"
        outage = Outage(f"{what}'t be read", "keeping the last", f"{what} be read again")
        while True:
            with outage.survive():
                await self.refresh()
            raise_if_cancelled()
            await wait_tick(REREAD_S)

    def _note(
        self,
        model: str,
        records: Mapping[str, AdapterRecord],
        removed: frozenset[str],
        scales: Mapping[str, float],
    ) -> None:
        contents = {name: record.sha256 for name, record in records.items()} if records else NOTHING
        self._known[model] = _Known(records, removed, scales, contents)

    def _is_other(self, kind: Unread, model: str, answer: object) -> bool:
        """Return whether `answer` is the error for a Redis key of another type: the last known value is then kept.

        Raises `answer` if it is any other error."""
        if not isinstance(answer, NO_ANSWER):
            return False
        if not is_of_one_name(answer):
            raise answer
        self._unreadable.skip(kind, model, answer)
        return True

    def _records(self, model: str, found: Any) -> dict[str, AdapterRecord]:
        records = {}
        for name, raw in fields_of(found).items():
            try:
                record = _decode(raw)
            except ValueError as error:
                self._unreadable.skip(Unread.ADAPTERS, name, error)
                continue
            records[record.name] = record
        return records

    def _removed(self, model: str, found: Iterable[bytes]) -> frozenset[str]:
        names = set[str]()
        for name in found:
            try:
                names.add(name.decode())
            except ValueError as error:
                self._unreadable.skip(Unread.REMOVED, name, error)
        return frozenset(names)

    def _scales(self, model: str, found: Any) -> dict[str, float]:
        scales = {}
        for name, scale in fields_of(found).items():
            try:
                value = float(scale)
                if not math.isfinite(value):
                    raise ValueError(f"{value} is no scale")
                scales[name.decode()] = value
            except ValueError as error:
                self._unreadable.skip(Unread.SCALES, name, error)
        return scales
