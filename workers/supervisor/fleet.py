"""Tells the fleet through Redis which models this machine keeps; removes a dead worker's record before it expires."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from redis.exceptions import NoPermissionError, RedisError

from workers.protocol import keys, residency
from workers.protocol.heartbeat import BEAT, Heartbeat, decode_heartbeat
from workers.protocol.residency import GatewayDemand, MachineModels
from workers.redis import link
from workers.sources import masked

TIMEOUT_S = 1.0
REACHABLE_S = 10.0
POLL_S = 0.02


log = logging.getLogger(__name__)


class NoRedis(RuntimeError):
    """There is no Redis that can be used; the message says why, and the remedy."""


@dataclass(frozen=True, slots=True)
class Look:
    """The answer of Redis to a supervisor that loads models on demand. Times are unix seconds."""

    demand: tuple[GatewayDemand, ...]
    """Of the gateways that told something lately."""
    asked: Mapping[str, float]
    """Model -> when an admin asked for it to be loaded."""
    beats: Mapping[str, Heartbeat]
    """Worker id -> its heartbeat; only workers that have registered."""


class Fleet:
    """The workers' records in Redis. Owns its connection; close it with `aclose`."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        # The caller decides whether to try again.
        self._client = link.connect(redis_url, timeout_s=TIMEOUT_S, retries=0)
        self._is_refused = False
        """Whether the log has been told that this login lacks rights."""

    async def forget(self, model: str, worker_id: str) -> None:
        """Remove a dead worker's heartbeat and wake the gateways. Best effort: without Redis the record expires."""
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                record = keys.worker(model, worker_id)
                await self._client.delete(record)
                await self._client.publish(keys.FLEET_CHANNEL, record)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("could not tell the fleet that %s is gone: %s", worker_id, error)

    async def wait_until_reachable(self, timeout_s: float = REACHABLE_S) -> None:
        """Wait until Redis answers PING. Raises NoRedis after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._client.ping()
                return
            except (RedisError, OSError) as error:
                if time.monotonic() > deadline:
                    where = masked("redis_url", self._url)
                    raise NoRedis(f"no Redis at {where} after {timeout_s:g} s ({error}); check --redis-url") from None
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

    async def look(self, workers: Mapping[str, str]) -> Look | None:
        """Return which models are wanted, and the heartbeats of these workers (id -> model); None: Redis does not
        answer. What can't be read is left out."""
        try:
            async with asyncio.timeout(2 * TIMEOUT_S), self._client.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(keys.DEMAND)
                pipeline.hgetall(keys.ASKED)
                for worker, model in workers.items():
                    pipeline.hget(keys.worker(model, worker), BEAT)
                told, asked, *beats = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError):
            return None
        found = zip(workers, map(_beat_of, beats), strict=True)
        return Look(
            tuple(_lately(told.values() if isinstance(told, dict) else (), time.time())),
            _times(asked if isinstance(asked, dict) else {}),
            {worker: beat for worker, beat in found if beat is not None},
        )

    async def tell(self, machine: str, models: MachineModels, answered: Iterable[str]) -> None:
        """Tell gateways what has become of this machine's models. `answered`: models that an admin asked for and that
        need not be asked for any more. Best effort: it is told again."""
        try:
            async with asyncio.timeout(2 * TIMEOUT_S), self._client.pipeline(transaction=False) as pipeline:
                pipeline.hset(keys.RESIDENCY, machine, residency.encode(models))
                pipeline.pexpire(keys.RESIDENCY, int(residency.LIFE_S * 1000))
                for model in answered:
                    pipeline.hdel(keys.ASKED, model)
                await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("could not tell gateways of this machine's models: %s", error)

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


def _beat_of(value: object) -> Heartbeat | None:
    try:
        return decode_heartbeat(value) if isinstance(value, bytes) else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _lately(told: Iterable[object], now: float) -> Iterable[GatewayDemand]:
    """Yield what gateways told within `residency.LIFE_S`."""
    for value in told:
        try:
            demand = residency.decode_demand(value) if isinstance(value, bytes) else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if demand is not None and abs(now - demand.at) < residency.LIFE_S:
            yield demand


def _times(asked: Mapping[bytes, bytes]) -> dict[str, float]:
    found: dict[str, float] = {}
    for model, value in asked.items():
        try:
            found[model.decode()] = float(value)
        except ValueError:  # UnicodeDecodeError as well
            continue
    return found
