"""The heartbeat, a worker's record in Redis, renewed several times within its lifetime (`keys.HEARTBEAT_TTL_S`); and
news, which tell what changed in the worker between two heartbeats.

All gateways get news as entries of the stream `pd:news`; each worker numbers its own entries. A gateway that misses a
number, or joins late, reads the worker's record and its heads again (`keys.worker`, `keys.worker_heads`) and continues
from the numbers in them. Heads are hashes of prefixes of requests (`workers.protocol.prefixes`).
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
"""Maximum number of heads (prefix hashes) that one worker publishes; those used longest ago are left out."""

FIELD = "n"
"""The field of an entry of `keys.NEWS` that holds `sealed_news`."""

_HEAD = Struct("<QI")
_VERSION = Struct("<Q")

MAX_HEADS_BYTES = _VERSION.size + MAX_HEADS * _HEAD.size
"""Maximum size of a value of `keys.worker_heads`."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load and measured costs. Times are milliseconds; 0: not known yet."""

    slots_busy: int = 0
    waiting: int = 0
    """Accepted calls that have no slot: they got none yet, or lost it when they were preempted."""
    kv_tokens_used: int = 0
    """KV cells of calls that have a slot. Cells of idle prefixes do not count, since new calls can evict them."""
    backlog_tokens: int = 0
    """Prompt tokens of accepted calls that are not computed yet."""
    free_in_ms: float = 0.0
    """Predicted time until a slot is freed, whether or not calls wait for it; 0: a slot is free now."""
    prefill_ms: float = 0.0
    """Time per token of a prompt."""
    decode_ms: float = 0.0
    """Time per token of one answer, at present load."""
    hold_ms: float = 0.0
    """Average time that a call holds its slot."""
    answer_tokens: float = 0.0
    """Tokens of a long answer: nine in ten of the last answers had no more."""
    encode_ms: float = 0.0
    """Time per KV cell of a picture or sound until its embeddings are there; `prefill_ms` comes on top."""
    bytes_per_token: float = 0.0
    """Average bytes per prompt token. It counts only the bytes that `workers.protocol.prefixes` hashes."""
    preempted: int = 0
    """Times since the process started that a call lost its KV cells for a while because no free cells were left."""


class News(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of `keys.NEWS`: a worker's load, and heads (prefix hashes) added and dropped since its last entry."""

    model: str
    worker: str
    boot: str
    version: int
    """Number of the entry, from 1; each entry of a process has the next number."""
    load: Load
    draining: bool = False
    added: Annotated[dict[int, int], Meta(max_length=MAX_HEADS)] = {}
    """Hash of a prefix (head) -> how many of its tokens this worker has cached: in its KV cache, in RAM or on disk."""
    dropped: Annotated[tuple[int, ...], Meta(max_length=MAX_HEADS)] = ()


encode_news = msgspec.msgpack.Encoder().encode
decode_news = msgspec.msgpack.Decoder(News).decode


class NotSealed(ValueError):
    """The seal is wrong: whoever wrote the entry does not hold the secret."""


def sealed_news(news: News, secret: str) -> bytes:
    """Return the value of an entry of `keys.NEWS`: the seal, then the news."""
    encoded = encode_news(news)
    return seal_news(secret, encoded) + encoded


def open_news(value: bytes, secret: str) -> News:
    """Return the news in a value that `sealed_news` made. Raises NotSealed, and msgspec.MsgspecError for an entry of
    another version of the protocol."""
    encoded = value[SEAL_BYTES:]
    if not fits(value[:SEAL_BYTES], seal_news(secret, encoded)):
        raise NotSealed
    return decode_news(encoded)


def pack_heads(version: int, heads: Mapping[int, int]) -> bytes:
    """Return the value of `keys.worker_heads`: prefix hashes and their cached tokens, as of news entry `version`."""
    return pack_version(version) + b"".join(_HEAD.pack(head, tokens) for head, tokens in heads.items())


def pack_version(version: int) -> bytes:
    """Return the start of a value of `keys.worker_heads`: the number of the last news entry included in it."""
    return _VERSION.pack(version)


def unpack_heads(packed: bytes) -> tuple[int, dict[int, int]]:
    """Return `version` and `heads` of a value that `pack_heads` made. Raises struct.error for other bytes."""
    (version,) = _VERSION.unpack_from(packed)
    return version, dict(_HEAD.iter_unpack(packed[_VERSION.size :]))


Modality = Literal["text", "image", "audio"]
"""A kind of input, by llama-server's and OpenAI's names."""

WorkerKind = Literal["generate", "embed", "rank"]
"""The work of a worker: generating text, or pooled work of one kind (`workers.protocol.pooled`)."""

PROTOCOL_VERSION = 6
"""Version of this protocol, raised when older gateways or workers would misunderstand it. Gateways use only workers of
their own version."""


BEAT = "beat"
"""The field of a worker's record that holds its `Heartbeat`."""
SEAL = "seal"
"""The field of a worker's record that holds the heartbeat's seal; gateways ignore records without a valid seal."""
PLACING = "placing"
"""The field of a worker's record that holds what admission scripts read (`placing_of`)."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the GGUF file, for `/v1/models` (llama-server's `meta`)."""

    n_ctx_train: int
    n_params: int
    size: int
    """Bytes of all tensors."""
    n_vocab: int
    inputs: tuple[Modality, ...] = ("text",)
    """Kinds of input that the model takes."""
    picture_cells: int = 0
    """KV cells that a picture of 1,024 x 1,024 pixels takes; 0: the model reads no pictures."""
    sound_cells: int = 0
    """KV cells that ten seconds of sound take; 0: the model reads no sound."""


class WorkerAddress(msgspec.Struct, frozen=True):
    """The identity of one worker process, and its URL."""

    model: str
    worker: str
    """Id of the worker; a restarted one keeps it."""
    boot: str
    """Id of the process; a restarted worker has a new one."""
    url: str
    """Base URL, without a slash at its end."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, as the fleet sees it.

    Fields with default values are encoded too: a missing `protocol` would be read as the reader's own version."""

    worker: str
    """Id of the worker; a restarted one keeps it."""
    boot: str
    """Id of this process; a restarted worker has a new one, and leases on the old process are void."""
    model: str
    """Name of the pool that the worker serves."""
    address: str
    """Base URL for gateways, `http://host:port`."""
    slots: int
    slots_busy: int
    n_ctx: int
    """Maximum length of one conversation, tokens."""
    kv_tokens: int
    """KV cells that all slots share."""
    kv_tokens_used: int
    """KV cells of calls that have a slot, as in `Load`."""
    facts: ModelFacts
    protocol: int = PROTOCOL_VERSION
    draining: bool = False
    """Whether it gets no new calls: it is about to end, is reserved, or is short of memory."""
    reserved: bool = False
    """Whether its supervisor wants its place for another worker. Calls go on, and it may be released again."""
    started_at: float = 0.0
    """Unix time at which the process started, seconds."""
    kind: WorkerKind = "generate"
    width: int = 0
    """Number of floats in a row of a `PoolResult`; 0: the worker does no pooled work, or does not tell."""
    infill: bool = False
    """Whether the model has fill-in-the-middle tokens."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that calls may use."""
    adapter_hashes: dict[str, str] = {}
    """Adapter -> SHA-256 of its file."""
    adapters_resident: tuple[str, ...] = ()
    """Adapters in memory; the others are loaded when the next call names them."""
    adapter_load_ms: float = 0.0
    """Milliseconds that loading an adapter took lately; 0: not known yet."""
    adapter_room: int = 0
    """Number of adapters that could be loaded now, in addition to those that calls use or that are pinned."""
    overdraft: int = 0
    """Number of calls beyond its slots that the worker takes for teams that have less than their share of the slots."""
    load: Load = Load()
    cache_ram_bytes: int = 0
    """Bytes of saved prefixes in main memory."""
    cache_disk_bytes: int = 0
    """Bytes in the folder of its disk tier, with those of workers that share it."""
    fingerprint: str = ""
    """Hash of what the worker computes with: the model's file and the build of llama.cpp. Empty: unknown."""
    version: int = 0
    """Number of the last entry of `pd:news` that this heartbeat includes."""

    @property
    def at(self) -> WorkerAddress:
        """The identity and address of this process."""
        return WorkerAddress(self.model, self.worker, self.boot, self.address.rstrip("/"))


def record_of(beat: Heartbeat, secret: str) -> dict[Any, Any]:
    """Return the fields of `keys.worker`: the heartbeat, its seal, and the values that admission scripts read."""
    encoded = encode_heartbeat(beat)
    return {BEAT: encoded, SEAL: seal_heartbeat(secret, encoded), PLACING: placing_of(beat)}


def placing_of(beat: Heartbeat) -> str:
    """Return what the admission scripts read of a worker, as one text that they read in one call of Redis.

    It is not sealed, as it only decides how many calls a worker gets: the address that gateways send calls to comes
    from the heartbeat alone."""
    slots = f"{beat.slots} {beat.kv_tokens} {beat.kv_tokens_used} {int(beat.draining)} {beat.overdraft}"
    return f"{beat.boot} {beat.protocol} {slots} {beat.address}"


def boot_in(placing: object) -> bytes:
    """Return the boot id in the field `PLACING` of a record, as Redis returned the field; empty if there is none."""
    return placing.partition(b" ")[0] if isinstance(placing, bytes) else b""


encode_heartbeat = msgspec.json.Encoder().encode
decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes; what other processes use is not free."""

    device: str
    """llama.cpp's name of the device: `CPU`, `CUDA0`."""
    total: int
    free: int
