"""What changes in a worker between two heartbeats, as it tells all gateways: one entry of the stream `pd:news`.

A worker numbers its entries. A gateway that misses a number, or joins late, reads the worker's record and its heads
anew (`keys.worker`, `keys.worker_heads`) and goes on from the numbers in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

import msgspec

from workers.protocol.proofs import SEAL_BYTES, fits, seal_news

MAX_HEADS = 8192
"""Of one worker; those used longest ago are left out."""

FIELD = "n"
"""Of an entry of the stream: holds `sealed_news`."""

_HEAD = Struct("<QI")
_VERSION = Struct("<Q")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a worker is, and what things cost there. Times are milliseconds; 0: not known yet."""

    slots_busy: int = 0
    waiting: int = 0
    """Calls that are accepted and hold no slot yet."""
    kv_tokens_used: int = 0
    """Cells that calls with a slot hold; cached prefixes give way and do not count."""
    backlog_tokens: int = 0
    """Prompt tokens of accepted calls that are not computed yet."""
    free_in_ms: float = 0.0
    """Until a slot is predicted to come free, whoever waits for it; 0 where one is."""
    prefill_ms: float = 0.0
    """Per token of a prompt."""
    decode_ms: float = 0.0
    """Per token of one answer, at present load."""
    hold_ms: float = 0.0
    """How long calls hold a slot, on average."""
    answer_tokens: float = 0.0
    """Of an answer: nine in ten are no longer."""
    bytes_per_token: float = 0.0
    """Of requests as `workers.protocol.prefixes` writes them."""
    preempted: int = 0
    """Calls that lost their cells to others and began anew, since the process started."""


class News(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry. Heads are told as they come and go; the rest as it is."""

    model: str
    worker: str
    boot: str
    version: int
    """Counts up by one with each entry of a process, from 1."""
    load: Load
    draining: bool = False
    added: dict[int, int] = {}
    """Head -> tokens that are cached behind it here, in the KV cache or in a tier below."""
    dropped: tuple[int, ...] = ()


encode_news = msgspec.msgpack.Encoder().encode
decode_news = msgspec.msgpack.Decoder(News).decode


class NotSealed(ValueError):
    """An entry that no holder of the secret wrote."""


def sealed_news(news: News, secret: str) -> bytes:
    """Return the value of an entry of `keys.NEWS`: its seal, then the news."""
    encoded = encode_news(news)
    return seal_news(secret, encoded) + encoded


def open_news(value: bytes, secret: str) -> News:
    """Return the news of such a value. Raises NotSealed; msgspec.MsgspecError for what is of another version."""
    encoded = value[SEAL_BYTES:]
    if not fits(value[:SEAL_BYTES], seal_news(secret, encoded)):
        raise NotSealed
    return decode_news(encoded)


def pack_heads(version: int, heads: Mapping[int, int]) -> bytes:
    """The value of `keys.worker_heads`: every head as of `version`."""
    return pack_version(version) + b"".join(_HEAD.pack(head, tokens) for head, tokens in heads.items())


def pack_version(version: int) -> bytes:
    """What such a value begins with: the heads that follow are those of `version`, too."""
    return _VERSION.pack(version)


def unpack_heads(packed: bytes) -> tuple[int, dict[int, int]]:
    """Raises struct.error for what is no such value."""
    (version,) = _VERSION.unpack_from(packed)
    return version, dict(_HEAD.iter_unpack(packed[_VERSION.size :]))
