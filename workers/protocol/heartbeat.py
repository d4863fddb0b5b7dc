"""The heartbeat: a worker's record in Redis, written several times within its lifetime (`keys.HEARTBEAT_TTL_S`)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from workers.protocol.news import Load
from workers.protocol.proofs import seal_heartbeat

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
