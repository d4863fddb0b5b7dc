"""`kill -9` of a gateway: its leases expire, its sequences are cancelled, the other gateway's streams are untouched."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from tests.fault.rest import at_rest
from tests.support.caller import calling
from tests.support.stack import Stack
from tests.support.waiting import until
from workers.protocol import keys

MODEL = "pool"


async def test_the_other_gateway_goes_on_and_everything_is_freed() -> None:
    with Stack() as stack:
        stack.fake_worker(MODEL, "--step-ms", "20", "--tokens", "700", worker_id="shared", slots=4)
        doomed, other = stack.gateway(), stack.gateway()
        async with (
            calling(doomed.url, stack.key, MODEL) as at_doomed,
            calling(other.url, stack.key, MODEL) as at_other,
            at_other.stream() as kept,
        ):
            await kept.until_text()
            async with at_doomed.stream() as lost_one, at_doomed.stream() as lost_two:
                await asyncio.gather(lost_one.until_text(), lost_two.until_text())
                assert stack.leases(MODEL) == 3
                doomed.kill()
                reading = kept.finish()
                finishing = asyncio.create_task(reading)
                for lost in (lost_one, lost_two):
                    with contextlib.suppress(aiohttp.ClientPayloadError):
                        await lost.finish()
                    assert not lost.done
            await until(lambda: stack.leases(MODEL) <= 1, keys.LEASE_TTL_S + 2, "the dead gateway's leases expire")

            def busy() -> int:
                beat = stack.heartbeat(MODEL, "shared")
                return beat.slots_busy if beat else 99

            await until(lambda: busy() <= 1, 10, "the dead gateway's sequences are cancelled")
            await asyncio.wait_for(finishing, 30)
        assert kept.error is None
        assert kept.done
        assert kept.usage is not None
        assert kept.usage["completion_tokens"] == 700
        assert max(b - a for a, b in zip(kept.arrived, kept.arrived[1:], strict=False)) < 1.0
        await at_rest(stack, MODEL)
