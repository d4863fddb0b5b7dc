"""More calls of one gateway in line than are re-read at once, and more leases than are renewed at once."""

from __future__ import annotations

import asyncio

import redis.asyncio

from gateway.admission.maintenance import RENEWED_AT_ONCE, REREAD_AT_ONCE
from tests.integration.admission.conftest import Lifetimes, Start
from tests.integration.admission.test_slots import Guest, in_line
from tests.support.pool import beat, call, heartbeat
from workers.protocol import keys


async def test_a_call_that_leaves_while_others_are_reread_is_not_put_back(
    client: redis.asyncio.Redis, start: Start
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1", lives=Lifetimes(sweep_s=30.0, ticket_ttl_s=30.0))
    guests = [Guest(one, call(patience_s=60.0)) for _ in range(1 + REREAD_AT_ONCE + 2)]
    await in_line(client, REREAD_AT_ONCE + 2)
    rereading = asyncio.create_task(one.admission._maintenance._reread_all("m"))
    await asyncio.sleep(0)  # the first part is on its way
    await guests[-1].cancel()
    await rereading
    assert await client.zcard(keys.tickets("m")) == one.admission.waiting("m") == REREAD_AT_ONCE + 1
    assert not await client.hexists(keys.ledger("m"), "settling")
    for guest in guests:
        await guest.cancel()


async def test_a_lease_that_is_given_back_while_others_are_renewed_is_not_taken_anew(
    client: redis.asyncio.Redis, start: Start
) -> None:
    num_leases = RENEWED_AT_ONCE + 3
    await beat(client, heartbeat("w1", slots=num_leases))
    one = await start("g1", lives=Lifetimes(sweep_s=30.0, ticket_ttl_s=30.0))
    guests = [Guest(one, call(patience_s=60.0)) for _ in range(num_leases)]
    async with asyncio.timeout(10):
        while len(one.admission._queue.held) < num_leases:  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.01)
    renewing = asyncio.create_task(one.admission._maintenance._renew_leases("m"))
    await asyncio.sleep(0)  # the first part is on its way
    await guests[-1].cancel()
    assert await renewing == frozenset()
    assert await client.zcard(keys.worker_leases("m", "w1")) == num_leases - 1
    for guest in guests[:-1]:
        await guest.cancel()
