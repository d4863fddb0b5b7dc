"""News: a worker's changes between two heartbeats, told to all gateways as entries of the stream `pd:news`.

A worker numbers its entries. A gateway that misses a number, or joins late, reads the worker's record and its heads
(prefix hashes) anew (`keys.worker`, `keys.worker_heads`) and goes on from the numbers in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

import msgspec

from workers.protocol.proofs import SEAL_BYTES, fits, seal_news

MAX_HEADS = 8192
"""Most heads of one worker; those used longest ago are left out."""

FIELD = "n"
"""The field of a stream's entry that holds `sealed_news`."""

_HEAD = Struct("<QI")
_VERSION = Struct("<Q")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load and measured costs. Times are milliseconds; 0: not known yet."""

    slots_busy: int = 0
    waiting: int = 0
    """Calls that are accepted and hold no slot yet."""
    kv_tokens_used: int = 0
    """KV cells that calls with a slot hold; cached prefixes give way and do not count."""
    backlog_tokens: int = 0
    """Prompt tokens of accepted calls that are not computed yet."""
    free_in_ms: float = 0.0
    """Predicted time until a slot comes free, whoever waits for it; 0 where one is free."""
    prefill_ms: float = 0.0
    """Time per token of a prompt."""
    decode_ms: float = 0.0
    """Time per token of one answer, at present load."""
    hold_ms: float = 0.0
    """Average time that calls hold a slot."""
    answer_tokens: float = 0.0
    """Usual tokens of an answer: nine in ten answers are no longer."""
    bytes_per_token: float = 0.0
    """Bytes per prompt token, of requests as `workers.protocol.prefixes` writes them."""
    preempted: int = 0
    """Calls since the process started that lost their KV cells to others and began anew."""


class News(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry. It tells which heads came and went, and the present state of the rest."""

    model: str
    worker: str
    boot: str
    version: int
    """Number of the entry: counts up by one with each entry of a process, from 1."""
    load: Load
    draining: bool = False
    added: dict[int, int] = {}
    """Head -> tokens of that prefix that are cached here, in the KV cache or in a tier below."""
    dropped: tuple[int, ...] = ()


encode_news = msgspec.msgpack.Encoder().encode
decode_news = msgspec.msgpack.Decoder(News).decode


class NotSealed(ValueError):
    """No holder of the secret wrote the entry."""


def sealed_news(news: News, secret: str) -> bytes:
    """Return the value of an entry of `keys.NEWS`: the seal, then the news."""
    encoded = encode_news(news)
    return seal_news(secret, encoded) + encoded


def open_news(value: bytes, secret: str) -> News:
    """Return the news in such a value. Raises NotSealed; msgspec.MsgspecError for an entry of another version."""
    encoded = value[SEAL_BYTES:]
    if not fits(value[:SEAL_BYTES], seal_news(secret, encoded)):
        raise NotSealed
    return decode_news(encoded)


def pack_heads(version: int, heads: Mapping[int, int]) -> bytes:
    """Return the value of `keys.worker_heads`: every head as of `version`."""
    return pack_version(version) + b"".join(_HEAD.pack(head, tokens) for head, tokens in heads.items())


def pack_version(version: int) -> bytes:
    """Return the beginning of such a value, which says that the heads after it are those of `version`."""
    return _VERSION.pack(version)


def unpack_heads(packed: bytes) -> tuple[int, dict[int, int]]:
    """Return version and heads of such a value. Raises struct.error for anything else."""
    (version,) = _VERSION.unpack_from(packed)
    return version, dict(_HEAD.iter_unpack(packed[_VERSION.size :]))
