"""What a worker says of itself in Redis, several times in the life of the record (`keys.HEARTBEAT_TTL_S`)."""

from __future__ import annotations

from typing import Literal

import msgspec

WorkerKind = Literal["generate", "embed", "rank"]
"""What a worker does: continue text, or pooled work of one kind (`workers.protocol.pooled`)."""

PROTOCOL_VERSION = 1
"""Raised when gateways and workers of different versions would misunderstand each other; only equal ones talk."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the GGUF file says, for `/v1/models` (llama-server's `meta`)."""

    n_ctx_train: int
    n_params: int
    size: int
    """Bytes of all tensors."""
    n_vocab: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, as the fleet sees it; the admission scripts read it too.

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
    """Those that calls with a slot hold; cached prefixes give way and do not count."""
    facts: ModelFacts
    protocol: int = PROTOCOL_VERSION
    draining: bool = False
    started_at: float = 0.0
    """Unix time, seconds."""
    kind: WorkerKind = "generate"
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that calls may use."""


encode_heartbeat = msgspec.json.Encoder().encode
decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode
