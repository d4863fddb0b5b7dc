"""The load: callers come at random moments, each with one deed; how each deed ended is recorded."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
from redis.exceptions import RedisError
from websockets.exceptions import WebSocketException

from benchmarks.soak import deeds, responses
from benchmarks.soak.deeds import Deed
from benchmarks.soak.fleet import TEAM_KEY, Fleet
from benchmarks.soak.record import Record
from benchmarks.soak.visitor import TROUBLE, Broken, Refused, Visitor

MIX: dict[Deed, int] = {
    deeds.chat_streamed: 12,
    deeds.chat_whole: 6,
    deeds.chat_with_tools: 4,
    deeds.chat_with_logprobs: 3,
    deeds.chat_in_a_schema: 4,
    deeds.chat_in_a_grammar: 1,
    deeds.completions: 5,
    deeds.embeddings: 4,
    deeds.messages: 6,
    deeds.native: 5,
    deeds.infill: 4,
    deeds.texts: 3,
    deeds.slots: 2,
    deeds.adapters: 2,
    deeds.asides: 2,
    deeds.leaving: 8,
    deeds.half_a_request: 2,
    deeds.slow_reader: 2,
    deeds.resumed: 4,
    deeds.bad_requests: 2,
    deeds.oversized: 1,
    deeds.key_changes: 1,
    responses.stored: 4,
    responses.streamed: 4,
    responses.background: 3,
    responses.followed: 2,
    responses.over_a_socket: 3,
}
"""Deed -> how often, of all."""
FILLING: dict[Deed, int] = {
    deeds.long_chat: 240,
    deeds.long_infill: 60,
    deeds.chat_in_a_schema: 240,
    deeds.slow_reader: 60,
    deeds.leaving: 120,
}
"""How many of which, before as many of all: 8,192 beginnings (`workers.protocol.heartbeat.MAX_HEADS`) for each of two
workers; 64 compiled forms (`workers.constraint.compiler`); large frames for the rings that gateways may read again
(`workers.service.calls.stream`); calls that were cut off, until each gateway's collector has run.
"""
FILLING_MIX = 1200
"""Of all deeds, as the load has them: 8,192 frames for each of four rings, and allocators that know every size."""
FILLERS_AT_ONCE = 8
MOST_AT_ONCE = 24
PATIENCE_S = 60.0
"""Longest deed; one that takes longer is a surprise."""
NUM_KEPT = 50
"""Surprises that are kept with their words."""


@dataclass(slots=True)
class Crowd:
    fleet: Fleet
    record: Record
    chance: random.Random
    mix: Mapping[Deed, int] = field(default_factory=lambda: MIX)
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def fill(self) -> None:
        """What fills with use, up to a bound, is full after this: caches, and what is remembered of beginnings."""
        async with _session() as session:
            share = self.record.plan.filling
            first = [deed for deed, count in FILLING.items() for _ in range(round(count * share))]
            for deed in (*first, *itertools.islice(self._deeds(), round(FILLING_MIX * share))):
                while len(self._running) >= FILLERS_AT_ONCE:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                self._send(deed, session)
            if self._running:
                await asyncio.wait(self._running)

    async def visit(self, for_s: float) -> None:
        """Load for so long; returns when every caller has gone."""
        async with _session() as session:
            ends = asyncio.get_running_loop().time() + for_s
            try:
                for deed in self._deeds():
                    await asyncio.sleep(self.chance.expovariate(self.record.plan.rate))
                    if asyncio.get_running_loop().time() > ends:
                        break
                    self._send(deed, session)
                if self._running:
                    await asyncio.wait(self._running)
            finally:
                for task in self._running:
                    task.cancel()

    @property
    def num_there(self) -> int:
        return len(self._running)

    def _deeds(self) -> Iterator[Deed]:
        """All of them, shuffled, again and again: the rare ones come too."""
        order = [deed for deed, weight in self.mix.items() for _ in range(weight)]
        while True:
            yield from self.chance.sample(order, len(order))

    def _send(self, deed: Deed, session: aiohttp.ClientSession) -> None:
        if len(self._running) >= MOST_AT_ONCE:
            self.record.turned_away += 1
            return
        key = self.chance.choice([self.fleet.stack.key, self.fleet.stack.key, TEAM_KEY])
        url, other = self.chance.sample(self.fleet.urls, 2)
        own = random.Random(self.chance.random())
        visitor = Visitor(self.fleet, session, own, url, other, key, self.fleet.models)
        task = asyncio.create_task(self._do(deed, visitor))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _do(self, deed: Deed, visitor: Visitor) -> None:
        self.record.num_deeds += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                await deed(visitor)
            ending = "ok"
        except Refused as refused:
            trouble = refused.status in TROUBLE
            ending = refused.code or str(refused.status) if trouble else self._surprise(deed, refused)
        except TimeoutError as error:  # an OSError, too
            ending = self._surprise(deed, error)
        except (Broken, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, WebSocketException):
            ending = "broken"
        except (RedisError, OSError):
            ending = "redis"
        except Exception as error:  # noqa: BLE001 - the task's edge: whatever else a caller meets is one
            ending = self._surprise(deed, error)
        self.record.endings.setdefault(name_of(deed), Counter())[ending] += 1

    def _surprise(self, deed: Deed, error: Exception) -> str:
        self.record.num_surprises += 1
        if len(self.record.surprises) < NUM_KEPT:
            self.record.surprises.append(f"{name_of(deed)}: {type(error).__name__} {error}"[:500])
        return "surprise"


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def name_of(deed: Deed) -> str:
    return f"{deed.__module__.rsplit('.', 1)[-1]}.{deed.__name__}"
