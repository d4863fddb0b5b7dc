"""Reads a bounded part of a hash in Redis that others may have filled."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.store.outage import NO_ANSWER, Unreadable
from gateway.store.packed import OF_ANOTHER_TYPE, Pauses, unpacked_keys, unpacked_texts
from gateway.store.scripts import load_members_script
from gateway.telemetry.metrics import Unread
from workers.redis.long_commands import LongCommands

MOST_FIELDS, MOST_BYTES = 1024, 8 << 20


async def read_hash(
    commands: LongCommands, name: str, kind: Unread, unreadable: Unreadable, longest_bytes: int
) -> Mapping[bytes, bytes]:
    """Return some MOST_FIELDS fields of a hash, of MOST_BYTES together; those that are longer than `longest_bytes` are
    left out and counted, as are others once (`kind`). Raises redis.RedisError, OSError."""
    source = load_members_script().source
    call = ("EVAL", source, 1, name, "hash", longest_bytes, 2 * MOST_FIELDS, MOST_BYTES, b"0")
    (answer,) = await commands.ask(call)
    if isinstance(answer, NO_ANSWER):
        raise answer
    found: dict[bytes, bytes] = {}
    pauses = Pauses()
    for what, packed in unpacked_keys(answer):
        if what == OF_ANOTHER_TYPE:
            unreadable.skip(kind, name, packed)
            continue
        texts = unpacked_texts(packed)
        if next(texts) != b"0":
            unreadable.skip(kind, name, "its fields are too many to be read at once")
        for field, value in zip(texts, texts, strict=False):
            if max(len(field), len(value)) > longest_bytes:
                unreadable.skip(kind, field, f"it has more than {longest_bytes} bytes")
            else:
                found[field] = value
            await pauses.rest()
    return found
