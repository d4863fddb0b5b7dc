"""Estimates the size of messages to workers: long ones are hashed and encoded on a thread, not on the event loop."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from workers.protocol.framing import BASE64_CHARS, BASE64_GROUP
from workers.protocol.heartbeat import ModelFacts
from workers.protocol.pooled import PoolInput, PoolPrompt, PoolRequest
from workers.protocol.queries import Detokenize, Render, Tokenize
from workers.protocol.requests import GenerateRequest, Medium, Message, Prompt, Submit

INLINE_CHARS = 256 << 10
"""A message counts as short if its texts have at most this many characters: encoding it takes about a millisecond."""
TOKEN_CHARS, BIAS_CHARS, ENTRY_CHARS = 6, 256, 32
"""Characters for which a token, a bias, and a message or tool call count. A bias can be a text of a few hundred
characters; a conversation from stored responses can have 160,000 messages without text."""


def num_chars(message: msgspec.Struct) -> int:
    """Return approximately how many characters the texts of a message have; a token counts as six."""
    match message:
        case Submit() | Render():
            return chars_of(message.request)
        case PoolRequest():
            return _of_media(message.media) + _of_parts(message.inputs)
        case Tokenize():
            return _of_part(message.content)
        case Detokenize():
            return _of_part(message.tokens)
    return 0


def chars_of(request: GenerateRequest) -> int:
    """Return approximately how many characters a request has: its prompt, tools, constraint and biases. Counting
    messages stops once the request counts as long. Pictures and sounds count by the base64 that is sent of them."""
    number = len(request.template_values) + _of_media(request.media)
    number += sum(len(tool.description or "") + len(tool.name) + len(tool.parameters or "") for tool in request.tools)
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
    return number + _of_messages(request.messages, INLINE_CHARS - number)


def _of_media(media: Iterable[Medium]) -> int:
    return sum(len(one.data) * BASE64_CHARS // BASE64_GROUP for one in media)


def _of_messages(messages: Iterable[Message], most: int) -> int:
    """Return approximately how many characters messages have; counting stops at `most`."""
    number = 0
    for message in messages:
        number += ENTRY_CHARS * (1 + len(message.tool_calls))
        if number > most:
            return number
        number += chars_of_message(message)
    return number


def chars_of_message(message: Message) -> int:
    """Return how many characters a message has. Ids count as well: no model reads them, but they are encoded, too."""
    number = len(message.content or "") + len(message.reasoning or "")
    number += len(message.name or "") + len(message.tool_call_id or "")
    if message.tool_calls:
        number += sum(len(call.arguments) + len(call.id) + len(call.name) for call in message.tool_calls)
    return number


CHARS_PER_TOKEN = 4
"""Characters of a text that are about as many tokens as one."""


def media_chars(message: Message, facts: ModelFacts) -> int:
    """Return about how many characters of text take as many tokens as a message's pictures and sounds, which count
    alike here."""
    return CHARS_PER_TOKEN * len(message.media) * max(facts.picture_cells, facts.sound_cells)


def _of_parts(parts: Iterable[PoolInput]) -> int:
    """Return approximately how many characters these inputs have together; counting stops at INLINE_CHARS."""
    number = 0
    for part in parts:
        if isinstance(part, PoolPrompt):
            number += len(part.text) + len(part.template_values) + _of_messages(part.messages, INLINE_CHARS)
        else:
            number += _of_part(part)
        if number > INLINE_CHARS:
            break
    return number


def _of_part(part: Prompt) -> int:
    if isinstance(part, str):
        return len(part)
    number = TOKEN_CHARS * len(part)
    if number > INLINE_CHARS or isinstance(part, array):
        return number
    # Half a millisecond for the largest number of tokens that gets here; `isinstance` would take ten times as long.
    return number + sum([len(one) for one in part if one.__class__ is str])
