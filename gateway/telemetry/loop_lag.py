"""Measures how late the event loop is: all streams wait for whatever holds it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 0.1


async def watch_loop(note: Callable[[float], None]) -> None:
    """Call `note` ten times a second with the seconds that a timer was late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        note(max(0.0, loop.time() - due))
