"""Tells by metrics how far the ledger is behind: what it has written, and how long the oldest usage has waited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from accounts.ledger.writer import LedgerCounts
from accounts.metrics import Metrics
from workers.protocol import keys
from workers.redis.trouble import raise_if_cancelled

LOOK_S = 5.0


class LedgerLag:
    """Sets the metrics of the ledger."""

    def __init__(self, redis: redis.asyncio.Redis, counts: LedgerCounts, metrics: Metrics) -> None:
        self._redis = redis
        self._counts = counts
        self._metrics = metrics
        self._shown = LedgerCounts()

    async def run(self) -> None:
        """Look now and then until cancelled. While Redis is away, the last lag grows on."""
        read_at, lag_s = time.monotonic(), 0.0
        while True:
            try:
                lag_s, read_at = await self._oldest_s(), time.monotonic()
                self._metrics.ledger_entries.set(int(await self._redis.xlen(keys.USAGE)))
            except (RedisError, OSError):
                pass  # the writer logs it
            self._metrics.ledger_lag.set(lag_s + (time.monotonic() - read_at if lag_s else 0.0))
            raise_if_cancelled()
            await asyncio.sleep(LOOK_S)

    def show_counts(self) -> None:
        """Add what the writer has done since the last call. Call it on the event loop, at a scrape."""
        self._metrics.process.count_tasks()
        now, shown = self._counts, self._shown
        added: tuple[tuple[Callable[[float], None], int], ...] = (
            (self._metrics.records_written.inc, now.num_written - shown.num_written),
            (self._metrics.records_repeated.inc, now.num_repeated - shown.num_repeated),
            (self._metrics.records_set_aside.inc, now.num_set_aside - shown.num_set_aside),
            (self._metrics.records_too_old.inc, now.num_too_old - shown.num_too_old),
        )
        for add, more in added:
            add(more)
        self._shown = replace(now)

    async def _oldest_s(self) -> float:
        """Return how long the oldest entry of the stream has been there; 0: there is none."""
        oldest: Any = await self._redis.xrange(keys.USAGE, count=1)
        if not oldest:
            return 0.0
        sent_ms, _, _ = oldest[0][0].partition(b"-")
        return max(0.0, time.time() - int(sent_ms) / 1000)
