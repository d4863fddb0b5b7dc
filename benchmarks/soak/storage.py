"""What lies in Redis: keys by family, those that never expire, leases and tickets, memory."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from gateway.store.integrity import IntegrityError, check_integrity

T = TypeVar("T")

VARIABLE = re.compile(r"\{[^}]*\}|(?<=worker:)[^:]+|(?<=held:).+|(?<=of:).+|(?<=pd:gateway:).+")
"""Parts of a name that tell one key of a family from another."""
HELD = ("pd:{}:calls", "pd:{}:line", "pd:{}:expiries", "pd:{}:held:")
"""Families of which nothing may be left when nobody calls."""
PATIENCE_S = 10.0
PAGE = 500
GONE, FOR_EVER = -2, -1
"""What PTTL tells."""
SIZES = {b"hash": "HLEN", b"set": "SCARD", b"zset": "ZCARD", b"stream": "XLEN", b"none": "EXISTS", b"string": "EXISTS"}
"""A string that changes its type meanwhile is an error, and counts as nothing."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What lay there at one moment."""

    at_s: float
    used_mib: float
    families: dict[str, int]
    """Family -> keys."""
    lasting: dict[str, int]
    """Family -> keys that never expire."""
    elements: dict[str, int]
    """Family -> fields, members or entries of its hashes, sets and streams."""

    def held(self) -> dict[str, int]:
        """Leases, tickets and places in line, where there are any."""
        return {name: count for name, count in self.families.items() if name in HELD}


def family(name: str) -> str:
    """`pd:{toy}:held:w1` -> `pd:{}:held:`."""
    return VARIABLE.sub(lambda match: "{}" if match[0].startswith("{") else "", name)


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again while Redis is struck. Raises redis.RedisError or OSError where it stays away for `PATIENCE_S`."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask()
        except (RedisError, OSError):
            if time.monotonic() > ends:
                raise
        await asyncio.sleep(0.1)


async def take_stock(client: redis.asyncio.Redis, now_s: float) -> Stock:
    """Raises redis.RedisError."""
    memory = await client.info("memory")
    families: Counter[str] = Counter()
    lasting: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    cursor = 0
    while True:
        cursor, found = await client.scan(cursor, count=PAGE)
        names = [name for name in found if isinstance(name, bytes)]
        ttls, sizes = await _looked_at(client, names)
        for name, ttl_ms, size in zip(names, ttls, sizes, strict=True):
            known = family(name.decode())
            families[known] += ttl_ms != GONE
            lasting[known] += ttl_ms == FOR_EVER
            elements[known] += size
        if not cursor:
            break
    return Stock(now_s, memory["used_memory"] / 2**20, dict(+families), dict(+lasting), dict(+elements))


async def _looked_at(client: redis.asyncio.Redis, names: list[bytes]) -> tuple[list[int], list[int]]:
    """Milliseconds that each has to live, and its size."""
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.pttl(name)
        pipeline.type(name)
    told = await pipeline.execute()
    pipeline = client.pipeline(transaction=False)
    for name, kind in zip(names, told[1::2], strict=True):
        pipeline.execute_command(SIZES.get(kind, "EXISTS"), name)
    sizes = await pipeline.execute(raise_on_error=False)
    return told[::2], [size if isinstance(size, int) else 0 for size in sizes]


async def breaches(client: redis.asyncio.Redis, models: Iterable[str]) -> list[str]:
    """What does not hold of the admission data."""
    found = []
    for model in models:
        try:
            await check_integrity(client, model)
        except IntegrityError as error:
            found.append(str(error))
    return found
