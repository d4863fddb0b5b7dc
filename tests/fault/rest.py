"""What every blow must leave behind: nothing leased, nobody in line, and data in Redis that agrees with itself."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio

from gateway.store.client import connect
from gateway.store.integrity import check_integrity, take_picture
from tests.support.stack import Stack
from workers.protocol import keys

REST_S = keys.LEASE_TTL_S + 4.0
"""What the dead have left is gone after this, on a machine that does other things as well."""
LOOK_S = 0.05


async def at_rest(stack: Stack, *models: str, within_s: float = REST_S, url: str = "") -> float:
    """Return the seconds until these models are at rest. Raises AssertionError where they are not in time, or where
    what is left in Redis is not whole. `url`: of the server that has them, where it is not the stack's.
    """
    began = time.monotonic()
    async with connect(url or stack.site or stack.redis.url) as client:
        for model in models:
            while left := await _left(client, model):
                assert time.monotonic() - began < within_s, f"{model} is not at rest after {within_s:g} s: {left}"
                await asyncio.sleep(LOOK_S)
        took_s = time.monotonic() - began
        for model in models:
            await check_integrity(client, model)
    return took_s


async def _left(client: redis.asyncio.Redis, model: str) -> list[str]:
    """Return the ids of leases, and of tickets in line."""
    picture = await take_picture(client, model)
    counted = {lease for leases in picture.expiries.values() for lease in leases}
    tickets = picture.queue.keys() | picture.tickets.keys() | picture.ticket_expiries.keys()
    return sorted(counted | picture.leases.keys() | tickets)
