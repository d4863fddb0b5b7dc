"""How late the event loop is: whatever holds it up, all streams wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 0.1


async def watch_loop(note: Callable[[float], None]) -> None:
    """Tells `note` ten times a second by how many seconds a timer was late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        note(max(0.0, loop.time() - due))
