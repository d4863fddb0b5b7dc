"""A pool of workers that exist in Redis only: what admission sees of a worker, written as a worker writes it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import redis.asyncio

from gateway.call import Call, Principal
from workers.protocol import keys
from workers.protocol.heartbeat import FIELD, Heartbeat, Load, ModelFacts, News, pack_heads, record_of, sealed_news

SECRET = "secret-of-the-pool"
"""What its workers seal with."""

ANYONE = Principal("key", "team", None, False)


def heartbeat(
    worker: str, *, model: str = "m", slots: int = 2, boot: str = "boot1", draining: bool = False, overdraft: int = 0
) -> Heartbeat:
    return Heartbeat(
        worker=worker,
        boot=boot,
        model=model,
        address=f"http://{worker}:1",
        slots=slots,
        slots_busy=0,
        n_ctx=512,
        kv_tokens=1024 * slots,
        kv_tokens_used=0,
        facts=ModelFacts(n_ctx_train=512, n_params=1, size=1, n_vocab=1),
        draining=draining,
        overdraft=overdraft,
    )


async def beat(redis: redis.asyncio.Redis, record: Heartbeat, *, ttl_s: float = 60.0, tell: bool = True) -> None:
    """One heartbeat; `tell` publishes it on the fleet's channel, as a worker does when it registers or drains."""
    async with redis.pipeline() as pipeline:
        pipeline.sadd(keys.MODELS, record.model)
        pipeline.sadd(keys.workers(record.model), record.worker)
        pipeline.hset(keys.worker(record.model, record.worker), mapping=record_of(record, SECRET))
        pipeline.pexpire(keys.worker(record.model, record.worker), round(ttl_s * 1000))
        if tell:
            pipeline.publish(keys.FLEET_CHANNEL, record.worker)
        await pipeline.execute()


async def tell(
    redis: redis.asyncio.Redis,
    record: Heartbeat,
    version: int,
    *,
    load: Load | None = None,
    draining: bool = False,
    added: Mapping[int, int] | None = None,
    dropped: tuple[int, ...] = (),
    kept: int = keys.NEWS_KEPT,
) -> News:
    """One entry of news, as the worker writes it."""
    news = News(
        model=record.model,
        worker=record.worker,
        boot=record.boot,
        version=version,
        load=load or record.load,
        draining=draining,
        added=dict(added or {}),
        dropped=dropped,
    )
    await redis.xadd(keys.NEWS, {FIELD: sealed_news(news, SECRET)}, maxlen=kept, approximate=kept == keys.NEWS_KEPT)
    return news


async def write_heads(redis: redis.asyncio.Redis, record: Heartbeat, version: int, heads: Mapping[int, int]) -> None:
    """All heads of a worker, as of that entry."""
    await redis.set(keys.worker_heads(record.model, record.worker), pack_heads(version, heads))


async def drain(redis: redis.asyncio.Redis, record: Heartbeat) -> None:
    await beat(redis, msgspec.structs.replace(record, draining=True))


async def vanish(redis: redis.asyncio.Redis, record: Heartbeat) -> None:
    """The record is gone, as when the worker died."""
    await redis.delete(keys.worker(record.model, record.worker))


def call(model: str = "m", *, patience_s: float = 10.0, start_s: float | None = None, team: str = ANYONE.team) -> Call:
    """`start_s`: how long it waits while its model has no worker; None: as long as for a slot."""
    now = time.monotonic()
    made = Call("request", replace(ANYONE, team=team), model, model, now, now + 600, 0.0)
    return made.waiting(now, queue_s=patience_s, start_s=patience_s if start_s is None else start_s)
