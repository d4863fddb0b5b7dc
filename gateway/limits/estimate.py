"""Estimates the tokens that a request takes before it is computed, by the bytes per token that the workers measure.

It runs on the event loop, and a body of 8 MiB can have millions of parts: of what is longer or more than is measured,
samples are, and the rest counts as long as these are on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.routing.cost import facts_of
from gateway.routing.placement import cells_of
from gateway.routing.pool import Pool
from workers.protocol.events import Usage
from workers.protocol.heartbeat import ModelFacts
from workers.protocol.pooled import PoolInput, PoolPrompt, PoolRequest
from workers.protocol.requests import GenerateRequest, Medium, Message, Prompt, ToolCall

T = TypeVar("T")

MEASURED = 1000
"""Number of messages, inputs or pieces of a prompt that are measured together, and at least LEAST_MEASURED of each
list."""
LEAST_MEASURED = 8
MEASURED_CALLS = 4
"""Number of tool calls of one message that are measured."""
MEASURED_CHARS = 1 << 16
"""Characters of a text that are measured, in PIECES pieces, where they are not all of one byte."""
PIECES = 16
GOLDEN = 0.6180339887498949
"""Multiples of it, less their whole parts, are spread evenly however many there are (Weyl's equidistribution)."""
MESSAGE_TOKENS = 4
"""Tokens of a template around each message."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted tokens of a request, and how long it computes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    compute_ms: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, 0)


def estimate(requests: Sequence[GenerateRequest], pool: Pool, most: int | None) -> Estimate:
    """Return the predicted tokens of a request with these answers; a prompt with several answers counts once.

    An answer counts by its `max_tokens` if the request names it, else by what the workers predict of any answer, but
    no more than `most`, the limit of its caller."""
    typical, facts = pool.typical, facts_of(pool)
    likely = typical.answer_tokens if most is None else min(typical.answer_tokens, most)
    measured = _share(len(requests))
    prompt_tokens, completion_tokens, before = 0.0, 0.0, None
    for request in requests:
        if before is None or not _is_same_prompt(request, before):
            prompt_tokens += _prompt_tokens(request, typical.bytes_per_token, measured)
            prompt_tokens += _cells_of(request.media, facts)
            before = request
        named = request.max_tokens
        completion_tokens += likely if named is None else named if most is None else min(named, most)
    return Estimate(round(prompt_tokens), round(completion_tokens), len(requests) * typical.hold_ms)


def estimate_pooled(request: PoolRequest, pool: Pool) -> Estimate:
    """Return the predicted tokens of pooled work."""
    per_token, facts = pool.typical.bytes_per_token, facts_of(pool)
    measured = _share(len(request.inputs))
    tokens = _total(request.inputs, MEASURED, lambda each: _tokens_of_input(each, per_token, measured))
    tokens += _cells_of(request.media, facts)
    if request.query is not None:
        tokens += len(request.inputs) * num_bytes(request.query) / per_token
    return Estimate(round(tokens), 0, pool.typical.hold_ms)


def num_bytes(text: str) -> int:
    """Return the text's bytes in UTF-8; of a long text about as many."""
    if text.isascii():
        return len(text)
    if len(text) <= MEASURED_CHARS:
        return len(text.encode("utf-8", "replace"))
    size = MEASURED_CHARS // PIECES
    starts = [(len(text) - size) * number // (PIECES - 1) for number in range(PIECES)]
    found = sum([len(text[start : start + size].encode("utf-8", "replace")) for start in starts])
    return round(found * len(text) / MEASURED_CHARS)


def _share(number: int) -> int:
    """Return how many parts of each of so many lists are measured."""
    return max(LEAST_MEASURED, MEASURED // max(1, number))


def _total(parts: Sequence[T], most: int, size: Callable[[T], float]) -> float:
    """Return the sizes of all parts together, as measured of `most` of them, spread evenly, but not at one distance:
    what recurs at a distance of its own would count for all or for nothing."""
    number = len(parts)
    if number <= most:
        return sum([size(part) for part in parts])
    return sum([size(parts[int(at * GOLDEN % 1.0 * number)]) for at in range(most)]) * number / most


def _is_same_prompt(one: GenerateRequest, other: GenerateRequest) -> bool:
    return one.prompt is other.prompt and one.messages is other.messages and one.infill is other.infill


def _prompt_tokens(request: GenerateRequest, per_token: float, measured: int) -> float:
    if request.prompt is not None:
        return _tokens_of(request.prompt, per_token, measured)
    if request.infill is not None:
        infill = request.infill
        parts = (infill.prefix, infill.suffix, infill.prompt, *(file.text for file in infill.files))
        return _total([each for each in parts if each], measured, lambda each: _tokens_of(each, per_token, measured))
    messages = request.messages
    of_messages = _total(messages, measured, _bytes_of_message)
    of_tools = sum(
        [len(tool.name) + len(tool.description or "") + len(tool.parameters or "") for tool in request.tools]
    )
    return (of_messages + of_tools) / per_token + MESSAGE_TOKENS * len(messages)


def _bytes_of_message(message: Message) -> float:
    number = num_bytes(message.content or "") + num_bytes(message.reasoning or "")
    if not message.tool_calls:
        return number
    return number + _total(message.tool_calls, MEASURED_CALLS, _bytes_of_call)


def _bytes_of_call(call: ToolCall) -> int:
    return num_bytes(call.name) + num_bytes(call.arguments)


def _cells_of(media: Sequence[Medium], facts: ModelFacts) -> int:
    return sum([cells_of(one.kind, facts) for one in media])


def _tokens_of_input(one: PoolInput, per_token: float, measured: int) -> float:
    if isinstance(one, PoolPrompt):
        return (num_bytes(one.text) + _total(one.messages, measured, _bytes_of_message)) / per_token
    return _tokens_of(one, per_token, measured)


def _tokens_of(part: Prompt, per_token: float, measured: int) -> float:
    if isinstance(part, str):
        return num_bytes(part) / per_token
    if isinstance(part, array):
        return float(len(part))
    return _total(part, measured, lambda one: num_bytes(one) / per_token if isinstance(one, str) else 1.0)
