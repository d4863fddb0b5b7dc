"""The machine of a gateway loses power: no FIN ever comes, and the other's callers soon have its slots."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import pytest

from tests.fault.rest import at_rest
from tests.support.caller import Caller, calling, taken
from tests.support.network_cut import can_make_islands, island
from tests.support.stack import Stack, free_port
from workers.protocol import keys

MODEL, SLOTS = "pool", 8
FLAGS = ("--step-ms", "20", "--tokens", "100000", "--ctx", "1000000", "--grace-s", "5")
BOUND_S = 15.0
"""Grace and 4 to 7 s, on a machine that does other things as well; it took 51 s."""


async def waited_s(caller: Caller) -> float:
    """Until eight callers have got all slots of the gateway that is gone."""
    begun = time.monotonic()
    async with taken(caller, SLOTS):
        return time.monotonic() - begun


@pytest.mark.long
@pytest.mark.skipif(not can_make_islands(), reason="needs root, to make network namespaces")
async def test_nobody_waits_long_for_its_slots() -> None:
    with island() as place, Stack() as stack:
        worker = stack.fake_worker(MODEL, *FLAGS, "--host", place.here, slots=SLOTS)
        assert place.here in worker.url
        other, port = stack.gateway(queue_timeout_s=60), free_port()
        settings = {"PADDOCK_HOST": place.there, "PADDOCK_PORT": str(port), "PADDOCK_GATEWAY_ID": "doomed"}
        command = [*place.command, sys.executable, "-m", "gateway.cli", "gateway"]
        doomed = stack.spawn("gateway-doomed", command, settings)
        doomed.url = f"http://{place.there}:{port}"
        stack.wait_until_ready(doomed)
        async with calling(doomed.url, stack.key, MODEL) as lost, taken(lost, SLOTS):
            assert stack.leases(MODEL) == SLOTS
            doomed.signal(signal.SIGSTOP)  # it reaches Redis by a file, which is not cut
            place.cut()
            async with calling(other.url, stack.key, MODEL) as caller:
                took_s = await waited_s(caller)
            doomed.signal(signal.SIGKILL)
        print(f"\nits slots were there after {took_s:.1f} s")
        assert took_s < BOUND_S
        await at_rest(stack, MODEL, within_s=BOUND_S)


@pytest.mark.long
async def test_its_beats_tell_where_something_between_acknowledges_for_it() -> None:
    """A stopped process: its kernel, as a proxy would, takes what the worker writes."""
    with Stack() as stack:
        stack.fake_worker(MODEL, *FLAGS, "--log-level", "info", slots=SLOTS)
        doomed, other = stack.gateway(), stack.gateway(queue_timeout_s=60)
        async with calling(doomed.url, stack.key, MODEL) as lost, taken(lost, SLOTS):
            await asyncio.sleep(2 * keys.GATEWAY_INTERVAL_S)
            doomed.signal(signal.SIGSTOP)
            async with calling(other.url, stack.key, MODEL) as caller:
                took_s = await waited_s(caller)
            doomed.signal(signal.SIGKILL)
        print(f"\nits slots were there after {took_s:.1f} s")
        assert took_s < BOUND_S
        assert "does not beat any more" in stack.workers[0].text()
        await at_rest(stack, MODEL, within_s=BOUND_S)
