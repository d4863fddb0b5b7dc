"""Waits until a stream has had no readers for longer than its grace period."""

from __future__ import annotations

import asyncio
import time

from gateway.errors import StoreUnavailable
from gateway.resume.recording import Recording
from gateway.store.stream_log import StreamLog

LOOK_EVERY_S = 0.3
SHORTEST_S = 0.01


async def unread(recording: Recording, log: StreamLog, grace_s: float) -> bool:
    """Wait until nobody has read the stream for `grace_s`, here or at another gateway. False: it ended before that."""
    seen: bytes | None = None
    read_at = time.monotonic()
    while not recording.ended:
        now = time.monotonic()
        if recording.num_readers:
            read_at = now
        else:
            read_at = max(read_at, recording.left_at)
            try:
                sign = await log.signs(recording.stream)
            except StoreUnavailable:
                # Nobody can tell whether it is read elsewhere. The limit for one request holds all the same.
                read_at = now
            else:
                if sign != seen:
                    seen, read_at = sign, now
                elif now - read_at >= grace_s:
                    return True
        await asyncio.sleep(max(SHORTEST_S, min(LOOK_EVERY_S, read_at + grace_s - now)))
    return False
