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
from typing import Any

import msgspec

from gateway.team_turns import TeamTurns, Turn
from workers.protocol.json_parts import json_parts
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest, Message, Submit
from workers.protocol.text import Detokenize, Render, Tokenize

INLINE_CHARS = 256 << 10
"""Characters of all texts of a message up to which it counts as short: encoding takes a millisecond or so."""
AT_ONCE = 2
"""Most long messages under way to one worker."""
SLICE_BYTES = 128 << 10
TOKEN_CHARS, VALUE_CHARS, BIAS_CHARS = 6, 4, 256
"""Characters that a token, a value in a schema and a bias (a text of a few hundred characters) count as."""

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
        if message is None or max(num_chars(message), known_bytes) <= INLINE_CHARS:
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


def num_chars(message: msgspec.Struct) -> int:
    """Return about how many characters the texts of a message have; a token counts as six."""
    match message:
        case Submit():
            return chars_of(message.request)
        case Render():
            request = message.request
            return chars_of(request) + _of_value([tool.parameters for tool in request.tools], request.template_values)
        case PoolRequest():
            return sum(map(_of_part, message.inputs))
        case Tokenize():
            return _of_part(message.content)
        case Detokenize():
            return _of_part(message.tokens)
    return 0


def chars_of(request: GenerateRequest) -> int:
    """Return about how many characters a request has: its prompt, tools' descriptions, constraint and biases.

    The schemas of its tools are not counted: for the usual twenty that takes as long as encoding them.
    """
    number = sum(len(tool.description or "") + len(tool.name) for tool in request.tools)
    if request.constraint is not None:
        number += len(request.constraint.text)
    if request.sampling.logit_bias:
        number += BIAS_CHARS * len(request.sampling.logit_bias)
    if request.prompt is not None:
        return number + _of_part(request.prompt)
    if request.infill is not None:
        infill = request.infill
        number += len(infill.prefix) + len(infill.suffix) + len(infill.prompt)
        return number + sum(len(file.text) for file in infill.files)
    return number + sum(map(chars_of_message, request.messages))


def chars_of_message(message: Message) -> int:
    """Return how many characters a message has, ids that no model reads included: they are encoded as well."""
    number = len(message.content or "") + len(message.reasoning or "")
    number += len(message.name or "") + len(message.tool_call_id or "")
    if message.tool_calls:
        number += sum(len(call.arguments) + len(call.id) + len(call.name) for call in message.tool_calls)
    return number


def _of_value(*values: Any) -> int:
    """Return about how many characters free-form values have; counting stops where they are long already."""
    number, left = 0, list(values)
    while left and number <= INLINE_CHARS:
        value = left.pop()
        if isinstance(value, str):
            number += len(value)
        elif isinstance(value, dict):
            number += sum(map(len, value))
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        number += VALUE_CHARS
    return number


def _of_part(part: str | tuple[int | str, ...]) -> int:
    if isinstance(part, str):
        return len(part)
    number = TOKEN_CHARS * len(part)
    if number > INLINE_CHARS:
        return number
    # This takes half a millisecond for as many tokens as get here; `isinstance` takes ten times as long.
    return number + sum([len(one) for one in part if one.__class__ is str])
