"""Interrupts a block when the request's client disconnects, and runs work in the background of a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from starlette.types import Receive

CLIENT_GONE_STATUS = 499
"""Status of a request whose client has gone, in the log only: nobody is there to read it. nginx's convention."""


class ClientGone(Exception):  # the end of a request that nobody waits for, not a fault
    """The client closed the connection."""


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Interrupt the block, wherever it waits, when the client disconnects; raise ClientGone then.

    The request's body must have been read before: anything else that arrives is discarded."""
    gone = False
    interrupt = asyncio.timeout(None)

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        interrupt.reschedule(0)

    try:
        async with interrupt, beside(watch()):
            yield
    except TimeoutError:
        if gone:
            raise ClientGone from None
        raise


@asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` in a task while the block runs, and cancel it when the block ends. Raises what `work` raised."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
