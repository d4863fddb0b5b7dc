"""Which of several models takes a conversation: by their weights, and the same one in every turn. Pure.

Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005): each model draws
a number for the conversation, and the highest has it. When a weight changes, only the conversations move that have to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from workers.protocol.catalog import Target
from workers.protocol.requests import GenerateRequest, Infill

OPENING_CHARS = 1024
"""Of a text that one writes in, so much stays the same."""

WHOLE_CHARS, END_CHARS = 64 << 10, 128
"""So much of an opening is hashed whole, and of longer texts behind it both ends and the length: hashing 8 MiB, or as
many tokens, would hold the event loop for tens of milliseconds.
"""
WHOLE_ITEMS, END_ITEMS = 4096, 256
"""The same of messages, and of a prompt's tokens and texts."""

_END = b"\x00"


def in_order(targets: Sequence[Target], conversation: str) -> tuple[str, ...]:
    """Names of the models, first the one that has the conversation; those without weight are left out.

    An empty `conversation` is nobody's in particular: then the heaviest comes first.
    """
    if conversation:
        ranked = sorted(targets, key=lambda target: -_draw(target, conversation))
    else:
        ranked = sorted(targets, key=lambda target: -target.weight)
    return tuple(target.model for target in ranked if target.weight)


def conversation_of(request: GenerateRequest, team: str, session: str) -> str:
    """What stays the same in all turns of a conversation, as a hash; conversations of two users hardly share it.

    `session` is the caller's own name for it; empty: it is known by how it begins.
    """
    named = blake2b(team.encode() + _END, digest_size=16)
    left = WHOLE_CHARS
    for text in ("session", session) if session else _opening(request):
        left -= len(text)
        named.update((text if left >= 0 else _ends_of(text)).encode() + _END)
    return named.hexdigest()


def _opening(request: GenerateRequest) -> Iterator[str]:
    """A chat up to its first message of a user: what comes before is often everybody's. A prompt is one turn."""
    if request.prompt is not None:
        yield from map(str, _parts(request.prompt))
    elif request.infill is not None:
        yield from _place(request.infill)
    else:
        for message in request.messages[:WHOLE_ITEMS]:
            yield message.content or ""
            if message.role == "user":
                return


def _parts(prompt: str | tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return what tells a prompt from others: all of its parts, or those at both ends and their number."""
    if isinstance(prompt, str):
        return (prompt,)
    if len(prompt) <= WHOLE_ITEMS:
        return prompt
    return (*prompt[:END_ITEMS], len(prompt), *prompt[-END_ITEMS:])


def _ends_of(text: str) -> str:
    """Return what tells a text from others nearly always."""
    return text if len(text) <= 2 * END_CHARS else f"{text[:END_CHARS]}\0{len(text)}\0{text[-END_CHARS:]}"


def _place(infill: Infill) -> Iterator[str]:
    yield infill.prefix[:OPENING_CHARS]
    yield from (file.name for file in infill.files)


def _draw(target: Target, conversation: str) -> float:
    """Each model has the highest one in a share of conversations like its share of the weights."""
    digest = blake2b(target.model.encode() + _END + conversation.encode(), digest_size=8).digest()
    between_0_and_1 = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)
    return -target.weight / math.log(between_0_and_1)
