"""What a worker is sent: encoded at once where it is short, on a thread and a few at a time where it is long.

Long ones are sent in slices, and what an encoded prompt takes is given back when its last slice is on its way. Several
answers to one request have a copy of its prompt each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest, Submit
from workers.protocol.text import Detokenize, Render, Tokenize

INLINE_CHARS = 256 << 10
"""Of all texts together; up to this, encoding takes less than a millisecond."""
AT_ONCE = 2
"""Long ones under way to one worker."""
SLICE_BYTES = 128 << 10

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Payload:
    """A body and the headers that go with it."""

    data: bytes | AsyncIterator[bytes] | None
    headers: Mapping[str, str]


class Payloads:
    """Of one worker process."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def of(self, message: msgspec.Struct | None) -> AsyncIterator[Payload]:
        """Encode a message. Leave the block when it is answered."""
        if message is None or num_chars(message) <= INLINE_CHARS:
            yield Payload(None if message is None else _encode(message), {})
            return
        turn = _Turn(self._turns)
        await self._turns.acquire()
        try:
            encoded = await asyncio.to_thread(_encode, message)
            length, slices = len(encoded), _slices(encoded, turn)
            del encoded
            yield Payload(slices, {"Content-Length": str(length)})
        finally:
            turn.over()


class _Turn:
    """Given back once, by whichever comes first: the last slice or the answer."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns: asyncio.Semaphore | None = turns

    def over(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()


async def _slices(encoded: bytes, turn: _Turn) -> AsyncIterator[bytes]:
    view = memoryview(encoded)
    del encoded
    for start in range(0, len(view), SLICE_BYTES):
        yield bytes(view[start : start + SLICE_BYTES])
    turn.over()


def num_chars(message: msgspec.Struct) -> int:
    """Return about how long the texts of a message are; a token counts as six characters."""
    match message:
        case Submit() | Render():
            return chars_of(message.request)
        case PoolRequest():
            return sum(map(_of_part, message.inputs))
        case Tokenize():
            return _of_part(message.content)
        case Detokenize():
            return _of_part(message.tokens)
    return 0


def chars_of(request: GenerateRequest) -> int:
    """Return about how long the prompt of a request is."""
    if request.prompt is not None:
        return _of_part(request.prompt)
    if request.infill is not None:
        infill = request.infill
        return len(infill.prefix) + len(infill.suffix) + sum(len(file.text) for file in infill.files)
    return sum(len(message.content or "") for message in request.messages) + 1024 * len(request.tools)


def _of_part(part: str | tuple[int | str, ...]) -> int:
    return len(part) if isinstance(part, str) else 6 * len(part)
