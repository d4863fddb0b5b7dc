"""Chooses one of several models for a conversation by their weights, the same one in every turn. Pure.

Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005): each model draws a
number for the conversation, and the highest wins. When a weight changes, only the conversations move that have to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from workers.models.catalog import Target
from workers.protocol.requests import GenerateRequest, Infill

OPENING_CHARS = 1024
"""Characters of an infill prefix that are hashed: a text that is being edited keeps its beginning."""

WHOLE_CHARS, END_CHARS = 64 << 10, 128
"""The first WHOLE_CHARS of an opening are hashed whole; of longer texts behind them both ends of END_CHARS and the
length. Hashing 8 MiB, or as many tokens, would hold the event loop for tens of milliseconds.
"""
WHOLE_ITEMS, END_ITEMS = 4096, 256
"""The same bounds for the number of messages, and of a prompt's tokens and texts."""

_END = b"\x00"


def in_order(targets: Sequence[Target], conversation: str) -> tuple[str, ...]:
    """Return the names of the models, first the one for the conversation; those without weight are left out.

    Without a conversation (empty) the model of most weight comes first.
    """
    if conversation:
        ranked = sorted(targets, key=lambda target: -_draw(target, conversation))
    else:
        ranked = sorted(targets, key=lambda target: -target.weight)
    return tuple(target.model for target in ranked if target.weight)


def conversation_of(request: GenerateRequest, team: str, session: str) -> str:
    """Return a hash that is the same in all turns of a conversation; those of two users hardly share one.

    `session` is the caller's own name for the conversation; empty: the hash is of how it begins.
    """
    named = blake2b(team.encode() + _END, digest_size=16)
    left = WHOLE_CHARS
    for text in ("session", session) if session else _opening(request):
        left -= len(text)
        named.update((text if left >= 0 else _ends_of(text)).encode() + _END)
    return named.hexdigest()


def _opening(request: GenerateRequest) -> Iterator[str]:
    """Yield a chat's texts up to its first user message (those before are often everybody's), or the whole prompt."""
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
    """Return the parts that identify a prompt: all of them, or those at both ends and their number."""
    if isinstance(prompt, str):
        return (prompt,)
    if len(prompt) <= WHOLE_ITEMS:
        return prompt
    return (*prompt[:END_ITEMS], len(prompt), *prompt[-END_ITEMS:])


def _ends_of(text: str) -> str:
    """Return the whole text if it is short, else both ends and the length, which nearly always identify it."""
    return text if len(text) <= 2 * END_CHARS else f"{text[:END_CHARS]}\0{len(text)}\0{text[-END_CHARS:]}"


def _place(infill: Infill) -> Iterator[str]:
    yield infill.prefix[:OPENING_CHARS]
    yield from (file.name for file in infill.files)


def _draw(target: Target, conversation: str) -> float:
    """Return a model's number for a conversation: how often it is the highest is the model's share of the weights."""
    digest = blake2b(target.model.encode() + _END + conversation.encode(), digest_size=8).digest()
    between_0_and_1 = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)
    return -target.weight / math.log(between_0_and_1)
