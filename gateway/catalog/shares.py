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

OPENING_BYTES = 1024
"""Of a text that one writes in, so much stays the same."""

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
    for text in (b"session", session.encode()) if session else _opening(request):
        named.update(text + _END)
    return named.hexdigest()


def _opening(request: GenerateRequest) -> Iterator[bytes]:
    """A chat up to its first message of a user: what comes before is often everybody's. A prompt is one turn."""
    if request.prompt is not None:
        parts = (request.prompt,) if isinstance(request.prompt, str) else request.prompt
        yield from (str(part).encode() for part in parts)
    elif request.infill is not None:
        yield from _place(request.infill)
    else:
        for message in request.messages:
            yield (message.content or "").encode()
            if message.role == "user":
                return


def _place(infill: Infill) -> Iterator[bytes]:
    yield infill.prefix.encode()[:OPENING_BYTES]
    yield from (file.name.encode() for file in infill.files)


def _draw(target: Target, conversation: str) -> float:
    """Each model has the highest one in a share of conversations like its share of the weights."""
    digest = blake2b(target.model.encode() + _END + conversation.encode(), digest_size=8).digest()
    between_0_and_1 = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)
    return -target.weight / math.log(between_0_and_1)
