"""Learns from Redis that a gateway has died although its connection looks open, as when its machine loses power.

If a gateway's heartbeat (`keys.gateway`) was there and is missing now, the gateway may be dead, but that is no proof.
So its connection is closed, once; a gateway that is alive connects again within the grace period and loses nothing.
A Redis that has lost its data, or that one gateway can't reach, costs a reconnection and no call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from redis.asyncio import Redis

from workers.protocol import keys
from workers.protocol.framing import gateway_of
from workers.redis.trouble import NO_ANSWER, raise_if_cancelled

logger = logging.getLogger(__name__)

MISSED = 2
"""Number of checks in a row without a heartbeat that make a gateway count as dead; a live one sends one per check."""


class GatewayWatch:
    """Watches the gateways of one worker. Its `run` is a task beside that of the worker's registration."""

    def __init__(
        self,
        redis: Redis,
        gateways: Callable[[], Iterable[str]],
        doubt: Callable[[str], None],
        *,
        interval_s: float = keys.GATEWAY_INTERVAL_S,
    ) -> None:
        """`gateways` returns the ids of the gateway processes to watch; `doubt` gets the id of a silent one."""
        self._redis = redis
        self._gateways = gateways
        self._doubt = doubt
        self._interval_s = interval_s
        self._seen: set[str] = set()
        """Ids of the gateway processes whose heartbeat some check has found, and that were not taken for dead since."""
        self._missed: Counter[str] = Counter()

    async def run(self) -> None:
        """Check the heartbeats of all gateways every `interval_s` until cancelled."""
        while True:
            try:
                await self._look()
            except (*NO_ANSWER, MemoryError):
                self._missed.clear()
            raise_if_cancelled()
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        processes = list(self._gateways())
        beats = await self._beats(processes)
        self._seen.intersection_update(processes)
        for process, beats_now in zip(processes, beats, strict=True):
            if beats_now:
                self._seen.add(process)
                del self._missed[process]
            elif process in self._seen:
                self._missed[process] += 1
                if self._missed[process] >= MISSED:
                    # Only once: not again before its heartbeats have come back and stopped anew.
                    self._seen.discard(process)
                    del self._missed[process]
                    logger.warning("gateway %s does not beat any more: its connection is closed", process)
                    self._doubt(process)

    async def _beats(self, processes: list[str]) -> list[bool]:
        if not processes:
            return []
        async with self._redis.pipeline(transaction=False) as pipeline:
            for process in processes:
                pipeline.exists(keys.gateway(gateway_of(process)))
            return [bool(answer) for answer in await pipeline.execute()]
