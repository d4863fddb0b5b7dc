"""The heartbeat, a worker's record in Redis, written several times within its lifetime (`keys.HEARTBEAT_TTL_S`); and
news, the worker's changes between two heartbeats.

All gateways get news as entries of the stream `pd:news`, which each worker numbers. A gateway that misses a number, or
joins late, reads the worker's record and its prefix hashes anew (`keys.worker`, `keys.worker_heads`) and goes on from
the numbers in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workers.protocol.control import SEAL_BYTES, fits, seal_heartbeat, seal_news

MAX_HEADS = 8192
"""Most heads of one worker; those used longest ago are left out."""

FIELD = "n"
"""The field of a stream's entry that holds `sealed_news`."""

_HEAD = Struct("<QI")
_VERSION = Struct("<Q")

MAX_HEADS_BYTES = _VERSION.size + MAX_HEADS * _HEAD.size
"""Most bytes of a value of `keys.worker_heads`."""


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
    added: Annotated[dict[int, int], Meta(max_length=MAX_HEADS)] = {}
    """Head -> tokens of that prefix that are cached here, in the KV cache or in a tier below."""
    dropped: Annotated[tuple[int, ...], Meta(max_length=MAX_HEADS)] = ()


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


WorkerKind = Literal["generate", "embed", "rank"]
"""The work of a worker: generating text, or pooled work of one kind (`workers.protocol.pooled`)."""

PROTOCOL_VERSION = 4
"""Version of this protocol, raised when older gateways or workers would misunderstand it; only equal ones talk."""


BEAT = "beat"
"""The field of a worker's record that holds its `Heartbeat`."""
SEAL = "seal"
"""The field that holds the heartbeat's seal: gateways ignore records without a valid one."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the GGUF file, for `/v1/models` (llama-server's `meta`)."""

    n_ctx_train: int
    n_params: int
    size: int
    """Bytes of all tensors."""
    n_vocab: int


class WorkerAddress(msgspec.Struct, frozen=True):
    """The identity of one worker process, and where it is reached."""

    model: str
    worker: str
    """Id of the worker; a restarted one keeps it."""
    boot: str
    """Id of the process; a restarted worker has a new one."""
    url: str
    """Base URL, without a slash at its end."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, as the fleet sees it.

    Defaults are written out: a `protocol` left out would be read as the reader's own version.
    """

    worker: str
    """Id that stays the same over restarts of this place in the fleet."""
    boot: str
    """Id of this process; a restarted worker has a new one, and leases of the old one are void."""
    model: str
    """Name of the pool it serves."""
    address: str
    """Base URL for gateways, `http://host:port`."""
    slots: int
    slots_busy: int
    n_ctx: int
    """Longest single conversation, tokens."""
    kv_tokens: int
    """KV cells that all slots share."""
    kv_tokens_used: int
    """KV cells that calls with a slot hold; cached prefixes give way and do not count."""
    facts: ModelFacts
    protocol: int = PROTOCOL_VERSION
    draining: bool = False
    started_at: float = 0.0
    """Unix time, seconds."""
    kind: WorkerKind = "generate"
    infill: bool = False
    """Whether the model has fill-in-the-middle tokens."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that calls may use."""
    adapter_hashes: dict[str, str] = {}
    """Adapter -> SHA-256 of its file."""
    adapters_resident: tuple[str, ...] = ()
    """Adapters in memory; the others are loaded by the next call that names them."""
    adapter_load_ms: float = 0.0
    """Milliseconds that loading an adapter took lately; 0: not known yet."""
    adapter_room: int = 0
    """Adapters that could be loaded now, beside those that calls use or that are pinned."""
    overdraft: int = 0
    """Calls beyond its slots that it takes for teams with less than their share, since it slices its answers."""
    load: Load = Load()
    fingerprint: str = ""
    """Hash of what it computes with: the model's file and the build of llama.cpp. Empty: unknown."""
    version: int = 0
    """Number of the last entry of `pd:news` that this heartbeat includes."""

    @property
    def at(self) -> WorkerAddress:
        """The identity and address of this process."""
        return WorkerAddress(self.model, self.worker, self.boot, self.address.rstrip("/"))


def record_of(beat: Heartbeat, secret: str) -> dict[Any, Any]:
    """Return the fields of `keys.worker`: the heartbeat, its seal, and, for speed, those that admission scripts read.

    The scripts' fields are not sealed: they say how many calls are sent, while the heartbeat alone says where to.
    """
    encoded = encode_heartbeat(beat)
    return {
        BEAT: encoded,
        SEAL: seal_heartbeat(secret, encoded),
        "boot": beat.boot,
        "address": beat.address,
        "protocol": beat.protocol,
        "slots": beat.slots,
        "draining": int(beat.draining),
        "kv": beat.kv_tokens,
        "kv_used": beat.kv_tokens_used,
        "overdraft": beat.overdraft,
    }


encode_heartbeat = msgspec.json.Encoder().encode
decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory in bytes, of all processes together."""

    device: str
    """llama.cpp's name of the device: `CPU`, `CUDA0`."""
    total: int
    free: int
