"""Encodes the messages to a worker: short ones at once, long ones on a thread, a few at a time.

Teams take turns with long ones. These are encoded and sent in slices, and each slice's memory is freed as it is sent: a
thread that encodes 32 MiB in one call holds the interpreter's lock, and every stream waits for 135 ms. Several answers
to one request have a copy of its prompt each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from gateway.dispatch.request_size import INLINE_CHARS, num_chars
from gateway.dispatch.team_turns import TeamTurns, Turn
from workers.protocol.json_parts import json_parts

AT_ONCE = 2
"""Most long messages under way to one worker."""
SLICE_BYTES = 128 << 10

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Payload:
    """A body and the headers that go with it."""

    data: bytes | AsyncIterator[bytes] | None
    headers: Mapping[str, str]


class Payloads:
    """Encodes messages to one worker process."""

    def __init__(self) -> None:
        self._turns = TeamTurns(AT_ONCE)

    @asynccontextmanager
    async def of(self, message: msgspec.Struct | None, known_bytes: int = 0) -> AsyncIterator[Payload]:
        """Encode a message and yield the body; leave the block when it is answered.

        `known_bytes`: size of its conversation, tools included, where that has been counted already.
        """
        if message is None or (known_bytes <= INLINE_CHARS and num_chars(message) <= INLINE_CHARS):
            yield Payload(None if message is None else _encode(message), {})
            return
        team: str = getattr(message, "tenant", "")
        turn = await self._turns.enter(team)
        try:
            parts = await asyncio.to_thread(deque, json_parts(message))
            yield Payload(_slices(parts, turn), {"Content-Length": str(sum(map(len, parts)))})
        finally:
            turn.leave()


async def _slices(parts: deque[bytes], turn: Turn) -> AsyncIterator[bytes]:
    while parts:
        part = parts.popleft()
        for start in range(0, len(part), SLICE_BYTES):
            yield part[start : start + SLICE_BYTES]
    turn.leave()
