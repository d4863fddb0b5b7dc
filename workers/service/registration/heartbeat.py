"""Registers a worker in Redis: writes its heartbeat, the prefix hashes (heads) of its cache, and news: entries that
tell changes of load and heads. Also keeps the averages by which gateways predict how long a call would wait.

Serving does not depend on Redis: while Redis is away the worker goes on, and it is back in the fleet with the first
beat (one writing of the heartbeat) that gets through.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Protocol

from msgspec.structs import replace
from redis.asyncio import Redis

from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad
from workers.protocol import keys
from workers.protocol.heartbeat import (
    FIELD,
    PLACING,
    Heartbeat,
    Load,
    News,
    boot_in,
    pack_heads,
    pack_version,
    record_of,
    sealed_news,
)
from workers.redis import link
from workers.redis.trouble import NO_ANSWER, is_of_one_name, raise_if_cancelled, remedy_for

REDIS_TIMEOUT_S = 2.0
"""Maximum seconds for connecting, and for one answer: as many as gateways wait (`gateway.store.client`). If workers
gave up earlier, a slow Redis would lose all of their records while gateways go on asking it for slots."""

NEWS_RATE = 2000.0
"""Maximum entries of news per second by all workers of a model together: with more workers, each writes less often."""

HEADS_INTERVAL_S = 2.0
"""Minimum seconds between two writings of all heads (prefix hashes); in between, entries of news tell the changes."""

HEADS_RATE = 20e6
"""Maximum bytes of prefix hashes per second by all workers of a model together: with more, each writes less often."""

logger = logging.getLogger(__name__)


def connect(url: str) -> Redis:
    """Return a client that fails fast and never retries, since the next heartbeat tries again. Raises BadRedisUrl."""
    return link.connect(url, timeout_s=REDIS_TIMEOUT_S, retries=0)


class Adverts(Protocol):
    """The part of `workers.service.registration.prefix_adverts.PrefixAdverts` that is needed here."""

    @property
    def published(self) -> Mapping[int, int]: ...
    def take(self) -> tuple[dict[int, int], tuple[int, ...]]: ...


class Registration:
    """Keeps one worker's record in Redis alive, and writes entries of news, which tell changes of load and heads.

    A record is written before the entry that goes with it, so a gateway that misses the entry reads a record no older.
    Entries are numbered, so gateways notice if one could not be sent; the next record and heads make up for it."""

    def __init__(
        self, redis: Redis, secret: str, read: Callable[[], Heartbeat], adverts: Adverts | None = None
    ) -> None:
        """`secret` seals heartbeats and news. `read` returns the heartbeat at once. No `adverts`: there is no cache."""
        self._redis = redis
        self._secret = secret
        self._read = read
        self._adverts = adverts
        self._hurry = asyncio.Event()
        self._announced: tuple[bool, dict[str, str]] | None = None
        """What the fleet was told last (draining, adapters); None: nothing yet, or nothing since Redis failed."""
        self._version = 0
        self._told: tuple[Load, bool] | None = None
        """The load, and whether the worker drains, as the last entry of news told them."""
        self._heads_changed = True
        """Whether prefix hashes changed since all of them were written. If not, only their version is written."""
        self._heads_bytes = 0
        self._beat_at = self._news_at = self._heads_at = 0.0
        """time.monotonic() at which the next heartbeat, entry of news and writing of all heads are due."""
        self._waits = False
        """Whether a log line has said that Redis does not answer."""
        self._fleet = 1
        """Number of workers of the model, by Redis' last answer."""
        self.registered = asyncio.Event()
        """Set once the first heartbeat has been written to Redis."""

    def hurry(self) -> None:
        """Have a heartbeat sent now, because something changed that the fleet should know."""
        self._hurry.set()

    async def run(self) -> None:
        """Send heartbeats and news until cancelled."""
        while True:
            raise_if_cancelled()
            try:
                await self._tell()
            except MemoryError:  # the next beat may find some
                logger.warning("out of memory: a beat was left out")
            except NO_ANSWER as error:
                why = f"{error}; {remedy_for(error)}"
                if self._announced is not None:
                    logger.warning(
                        "Redis does not answer (%s); serving goes on, registering again when it is back", why
                    )
                elif not self.registered.is_set() and not self._waits:
                    logger.warning("Redis does not answer yet (%s); waiting for it", why)
                if is_of_one_name(error):
                    await self._clear()
                self._waits = True
                self._announced = self._told = None
                self._heads_changed, self._heads_at = True, 0.0
            try:
                async with asyncio.timeout(max(0.0, min(self._beat_at, self._news_at) - time.monotonic())):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    async def _clear(self) -> None:
        """Delete values of a wrong type under this worker's own names in Redis: they prevent heartbeats."""
        mine = self._read()
        record, heads = keys.worker(mine.model, mine.worker), keys.worker_heads(mine.model, mine.worker)
        with contextlib.suppress(*NO_ANSWER):
            for name, kind in ((record, b"hash"), (heads, b"string")):
                if await self._redis.type(name) not in (kind, b"none"):
                    logger.error("something else lies under %s in Redis and is deleted", name)
                    await self._redis.delete(name)

    async def leave(self) -> None:
        """Delete this worker's record, unless a worker that took its place has overwritten it."""
        mine = self._read()
        name = keys.worker(mine.model, mine.worker)
        try:
            async with asyncio.timeout(2 * REDIS_TIMEOUT_S):
                # Its heartbeat can't be read where a successor speaks another version.
                if boot_in(await self._redis.hget(name, PLACING)) == mine.boot.encode():
                    await self._redis.delete(name, keys.worker_heads(mine.model, mine.worker))
                await self._redis.publish(keys.FLEET_CHANNEL, name)
        except NO_ANSWER as error:
            logger.warning("could not take the record %s out of Redis (%s); it expires by itself", name, error)

    async def _tell(self) -> None:
        """Write whatever is due: the record, an entry of news, all heads."""
        now, beat = time.monotonic(), self._read()
        hurries = self._hurry.is_set() or (beat.draining, beat.adapter_hashes) != self._announced
        self._hurry.clear()
        beats = hurries or now >= self._beat_at
        news: News | None = None
        if hurries or now >= self._news_at:
            news = self._next_news(beat)
            self._news_at = now + max(keys.NEWS_INTERVAL_S, self._fleet / NEWS_RATE)
        writes_heads = self._adverts is not None and self._heads_changed and now >= self._heads_at
        if beats or writes_heads:
            self._beat_at = now + keys.HEARTBEAT_INTERVAL_S
            await self._write(replace(beat, version=self._version), with_heads=writes_heads)
        await self._spread(beat, news, registers=beats)

    def _next_news(self, beat: Heartbeat) -> News | None:
        """Return the next entry of news; None where nothing has changed."""
        added, dropped = self._adverts.take() if self._adverts is not None else ({}, ())
        if not added and not dropped and (beat.load, beat.draining) == self._told:
            return None
        self._told = beat.load, beat.draining
        self._heads_changed = self._heads_changed or bool(added or dropped)
        self._version += 1
        return News(
            model=beat.model,
            worker=beat.worker,
            boot=beat.boot,
            version=self._version,
            load=beat.load,
            draining=beat.draining,
            added=added,
            dropped=dropped,
        )

    async def _write(self, beat: Heartbeat, *, with_heads: bool) -> None:
        """Write the record, and renew the lifetime of the heads. Write all heads if `with_heads`. Otherwise, if none
        has changed, write only their version number."""
        name, heads = keys.worker(beat.model, beat.worker), keys.worker_heads(beat.model, beat.worker)
        ttl_ms, record = int(keys.HEARTBEAT_TTL_S * 1000), record_of(beat, self._secret)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(name, mapping=record)
            pipe.pexpire(name, ttl_ms)
            pipe.sadd(keys.workers(beat.model), beat.worker)
            pipe.scard(keys.workers(beat.model))
            if with_heads and self._adverts is not None:
                packed = pack_heads(self._version, self._adverts.published)
                pipe.set(heads, packed)
                self._heads_at = time.monotonic() + max(HEADS_INTERVAL_S, self._fleet * len(packed) / HEADS_RATE)
                self._heads_bytes = len(packed)
            elif self._heads_changed:
                pipe.strlen(heads)
            else:
                pipe.setrange(heads, 0, pack_version(self._version))
            pipe.pexpire(heads, ttl_ms)
            *_, self._fleet, num_bytes, _ = await pipe.execute()
        if with_heads:
            self._heads_changed = False
        elif self._adverts is not None and num_bytes != self._heads_bytes:  # Redis has lost them
            # A number is left out, so that gateways which have read the heads since read them again.
            self._version += 1
            self._heads_changed, self._heads_at, self._told = True, 0.0, None

    async def _spread(self, beat: Heartbeat, news: News | None, *, registers: bool) -> None:
        """Write to the names in Redis that all models share: the list of models, the news, the fleet's channel."""
        async with self._redis.pipeline(transaction=False) as pipe:
            if registers:
                pipe.sadd(keys.MODELS, beat.model)
            if news is not None:
                pipe.xadd(keys.NEWS, {FIELD: sealed_news(news, self._secret)}, maxlen=keys.NEWS_KEPT, approximate=True)
            answers = await pipe.execute(raise_on_error=False) if len(pipe) else []
        for answer in answers:
            if isinstance(answer, NO_ANSWER):
                if not is_of_one_name(answer):
                    raise answer
                # These names are shared: gateways report what lies there, and find this worker without them.
                logger.debug("could not tell all of the fleet: %s", answer)
        announced = beat.draining, beat.adapter_hashes
        if announced == self._announced:
            return
        name = keys.worker(beat.model, beat.worker)
        await self._redis.publish(keys.FLEET_CHANNEL, name)
        if self._announced is None:
            logger.info("registered as %s", name)
        self._announced = announced
        self.registered.set()


_WEIGHT = 0.1
"""Weight of the newest call in an average; all calls before it have the rest."""

_GAP_WEIGHT = 0.3
"""Weight, in the average gap between tokens, of the gaps counted since the last `_look`; older gaps have the rest."""


class Rates:
    """Averages this worker's calls and their costs, to predict how long the next call would wait. Use it on one event
    loop."""

    def __init__(self) -> None:
        self._num_bytes = self._num_tokens = 0.0
        self._hold_s = 0.0
        self._decode_s = 0.0
        self._gaps = (0, 0.0)
        """Number and sum (seconds) of all gaps between tokens that the engine had counted at the last `_look`."""

    def accepted(self, num_bytes: int, num_tokens: int) -> None:
        """Count a prompt. `num_bytes`: length of its conversation in the form that prefix hashes are made from."""
        keep = 1 - _WEIGHT
        self._num_bytes = self._num_bytes * keep + num_bytes
        self._num_tokens = self._num_tokens * keep + num_tokens

    def held(self, started_at: float) -> None:
        """Count a call that gave its slot back, however it ended. `started_at`: `time.monotonic` seconds."""
        seconds = time.monotonic() - started_at
        self._hold_s += (seconds - self._hold_s) * (_WEIGHT if self._hold_s else 1.0)

    def load(self, engine: EngineLoad, counters: EngineCounters) -> Load:
        self._look(counters)
        return Load(
            slots_busy=engine.slots_busy,
            waiting=engine.waiting,
            kv_tokens_used=engine.kv_tokens_used,
            backlog_tokens=engine.backlog_tokens,
            free_in_ms=_rounded(self._free_in_s(engine) * 1e3),
            prefill_ms=_rounded(engine.prefill_s * 1e3),
            encode_ms=_rounded(engine.encode_s * 1e3),
            decode_ms=_rounded(self._decode_s * 1e3),
            hold_ms=_rounded(self._hold_s * 1e3),
            answer_tokens=engine.answer_tokens,
            bytes_per_token=_rounded(self._num_bytes / self._num_tokens) if self._num_tokens else 0.0,
            preempted=counters.num_preempted,
        )

    def _look(self, counters: EngineCounters) -> None:
        count, total = sum(counters.gap_s.counts), counters.gap_s.total
        more, seconds = count - self._gaps[0], total - self._gaps[1]
        if more > 0:
            self._decode_s += (seconds / more - self._decode_s) * (_GAP_WEIGHT if self._decode_s else 1.0)
            self._gaps = count, total

    def _free_in_s(self, engine: EngineLoad) -> float:
        """Predict the seconds until a slot comes free, if prompts are computed one by one and answers side by side."""
        if engine.slots_busy < engine.slots or not engine.running:
            return 0.0
        prompts = accumulate(call.num_prompt for call in engine.running)
        return min(
            before * engine.prefill_s + call.num_answer * self._decode_s
            for before, call in zip(prompts, engine.running, strict=True)
        )


def _rounded(value: float) -> float:
    """Round the value to three significant digits, so that tiny changes of it cause no entry of news."""
    return float(f"{value:.3g}")
