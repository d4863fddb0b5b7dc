"""Picks one of the models that share a name: all turns of a conversation go to the same one. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from workers.models.catalog import Target
from workers.protocol.requests import GenerateRequest, Infill, Prompt

OPENING_CHARS = 1024
"""Characters of an infill's prefix that identify its conversation: while a text is edited, its beginning stays."""

WHOLE_CHARS, END_CHARS = 64 << 10, 128
"""The first texts of a conversation are hashed whole, up to WHOLE_CHARS characters together. Of the text that exceeds
this and of each later one, only the length and END_CHARS at either end are hashed: hashing 8 MiB, or as many tokens,
would hold up the event loop for tens of milliseconds."""
WHOLE_ITEMS, END_ITEMS = 4096, 256
"""At most WHOLE_ITEMS messages are hashed. Of a prompt of more parts, only their number and END_ITEMS at each end."""

_END = b"\x00"


def rank_targets(targets: Sequence[Target], conversation: str) -> tuple[str, ...]:
    """Return the names of the models in the order to try them for this conversation; models of weight 0 are left out.

    `conversation`: the conversation's hash; empty: the models are sorted by weight, the greatest first."""
    if conversation:
        ranked = sorted(targets, key=lambda target: -_draw(target, conversation))
    else:
        ranked = sorted(targets, key=lambda target: -target.weight)
    return tuple(target.model for target in ranked if target.weight)


def conversation_of(request: GenerateRequest, team: str, session: str) -> str:
    """Return a hash that is the same in all turns of a conversation, and almost never the same for two users.

    `session`: the caller's own name for the conversation; empty: the texts at its beginning are hashed."""
    named = blake2b(team.encode() + _END, digest_size=16)
    left = WHOLE_CHARS
    for text in ("session", session) if session else _opening_texts(request):
        left -= len(text)
        named.update((text if left >= 0 else _ends_of(text)).encode() + _END)
    return named.hexdigest()


def _opening_texts(request: GenerateRequest) -> Iterator[str]:
    """Yield a chat's texts up to and including its first user message, as earlier texts can be the same in many chats.
    For another request, yield its prompt or, for an infill, the beginning of its prefix and its file names."""
    if request.prompt is not None:
        yield from map(str, _parts(request.prompt))
    elif request.infill is not None:
        yield from _infill_texts(request.infill)
    else:
        for message in request.messages[:WHOLE_ITEMS]:
            yield message.content or ""
            if message.role == "user":
                return


def _parts(prompt: Prompt) -> Sequence[int | str]:
    """Return the parts of a prompt that identify it: all or, if there are many, both ends and the number."""
    if isinstance(prompt, str):
        return (prompt,)
    if len(prompt) <= WHOLE_ITEMS:
        return prompt
    return (*prompt[:END_ITEMS], len(prompt), *prompt[-END_ITEMS:])


def _ends_of(text: str) -> str:
    """Return the whole text if it is short, otherwise both ends and the length, which nearly always identify it."""
    return text if len(text) <= 2 * END_CHARS else f"{text[:END_CHARS]}\0{len(text)}\0{text[-END_CHARS:]}"


def _infill_texts(infill: Infill) -> Iterator[str]:
    yield infill.prefix[:OPENING_CHARS]
    yield from (file.name for file in infill.files)


def _draw(target: Target, conversation: str) -> float:
    """Return a model's score for a conversation; the conversation goes to the model with the highest score. Each model
    gets as many conversations as its share of the weights.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005). When a weight
    changes, no more conversations change their model than necessary."""
    digest = blake2b(target.model.encode() + _END + conversation.encode(), digest_size=8).digest()
    between_0_and_1 = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)
    return -target.weight / math.log(between_0_and_1)
