"""Of one key and session, the newest call alone goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.api.responder import SessionCalls
from gateway.call import Call, Principal
from gateway.errors import Superseded


def call(key: str = "k", session: str = "window") -> Call:
    now = time.monotonic()
    return Call("r", Principal(key, "team", None, False), "m", "m", now, now + 60, now + 60, session=session)


async def begun(superseding: SessionCalls, one: Call) -> asyncio.Task[None]:
    """A call that goes on until somebody ends it."""

    async def run() -> None:
        async with superseding.supersede(one):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    return task


async def test_the_newer_ends_the_older_again_and_again() -> None:
    superseding = SessionCalls()
    first = await begun(superseding, call())
    second = await begun(superseding, call())
    with pytest.raises(Superseded, match="newer request of this session"):
        await first
    third = await begun(superseding, call())
    with pytest.raises(Superseded):
        await second
    assert not third.done()
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third


async def test_other_keys_other_sessions_and_those_without_one_are_left_alone() -> None:
    superseding = SessionCalls()
    others = [await begun(superseding, one) for one in (call(), call(key="other"), call(session="b"), call(session=""))]
    nobody = await begun(superseding, call(session=""))
    assert not any(task.done() for task in (*others, nobody))
    for task in (*others, nobody):
        task.cancel()
    await asyncio.gather(*others, nobody, return_exceptions=True)


async def test_one_that_has_ended_is_forgotten() -> None:
    superseding = SessionCalls()
    async with superseding.supersede(call()):
        pass
    assert not superseding._latest
    later = await begun(superseding, call())
    assert not later.done()
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)
