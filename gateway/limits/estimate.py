"""Estimates the tokens that a request takes before it is computed, by the bytes per token that the workers measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.routing.cost import facts_of
from gateway.routing.placement import cells_of
from gateway.routing.pool import Pool
from workers.protocol.events import Usage
from workers.protocol.heartbeat import ModelFacts
from workers.protocol.pooled import PoolInput, PoolPrompt, PoolRequest
from workers.protocol.requests import GenerateRequest, Medium, Message, Prompt

MEASURED_MESSAGES = 1000
"""Number of messages of a longer conversation that are measured; the others count as long as these on average."""
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
    prompt_tokens, completion_tokens, before = 0.0, 0.0, None
    for request in requests:
        if before is None or not _is_same_prompt(request, before):
            prompt_tokens += _prompt_tokens(request, typical.bytes_per_token) + _cells_of(request.media, facts)
            before = request
        named = request.max_tokens
        completion_tokens += likely if named is None else named if most is None else min(named, most)
    return Estimate(round(prompt_tokens), round(completion_tokens), len(requests) * typical.hold_ms)


def estimate_pooled(request: PoolRequest, pool: Pool) -> Estimate:
    """Return the predicted tokens of pooled work."""
    per_token, facts = pool.typical.bytes_per_token, facts_of(pool)
    tokens = sum([_tokens_of_input(each, per_token) for each in request.inputs]) + _cells_of(request.media, facts)
    if request.query is not None:
        tokens += len(request.inputs) * num_bytes(request.query) / per_token
    return Estimate(round(tokens), 0, pool.typical.hold_ms)


def num_bytes(text: str) -> int:
    """Return the text's bytes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _is_same_prompt(one: GenerateRequest, other: GenerateRequest) -> bool:
    return one.prompt is other.prompt and one.messages is other.messages and one.infill is other.infill


def _prompt_tokens(request: GenerateRequest, per_token: float) -> float:
    if request.prompt is not None:
        return _tokens_of(request.prompt, per_token)
    if request.infill is not None:
        infill = request.infill
        parts = (infill.prefix, infill.suffix, infill.prompt, *(file.text for file in infill.files))
        return sum([_tokens_of(each, per_token) for each in parts if each])
    messages = request.messages
    step = max(1, len(messages) // MEASURED_MESSAGES)
    measured = messages[::step]
    of_messages = sum(map(_bytes_of_message, measured)) * len(messages) / max(1, len(measured))
    of_tools = sum(
        [len(tool.name) + len(tool.description or "") + len(tool.parameters or "") for tool in request.tools]
    )
    return (of_messages + of_tools) / per_token + MESSAGE_TOKENS * len(messages)


def _bytes_of_message(message: Message) -> int:
    number = num_bytes(message.content or "") + num_bytes(message.reasoning or "")
    for call in message.tool_calls:
        number += num_bytes(call.name) + num_bytes(call.arguments)
    return number


def _cells_of(media: Sequence[Medium], facts: ModelFacts) -> int:
    return sum([cells_of(one.kind, facts) for one in media])


def _tokens_of_input(one: PoolInput, per_token: float) -> float:
    if isinstance(one, PoolPrompt):
        return (num_bytes(one.text) + sum(map(_bytes_of_message, one.messages))) / per_token
    return _tokens_of(one, per_token)


def _tokens_of(part: Prompt, per_token: float) -> float:
    if isinstance(part, str):
        return num_bytes(part) / per_token
    if len(part) > MEASURED_MESSAGES or not any(isinstance(one, str) for one in part):
        return float(len(part))
    return sum((num_bytes(one) / per_token if isinstance(one, str) else 1.0) for one in part)
