"""What goes into the engine, and what it says of its load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.protocol.requests import Sampling


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One call, tokenised."""

    key: int
    """Number of the call in this engine, never used twice."""
    tokens: Sequence[int]
    """The prompt, begin token included where the model wants one."""
    max_tokens: int | None
    """Most tokens to generate; None: until the conversation is `n_ctx` long; 0: compute the prompt only."""
    stop: tuple[str, ...]
    sampling: Sampling
    """None fields stand for llama-server's defaults."""
    ignore_eos: bool = False
    label: str = ""
    """For log lines."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    slots: int
    slots_busy: int
    waiting: int
    """Calls that are accepted and hold no slot yet."""
    kv_tokens: int
    kv_tokens_used: int
    """Cells that hold a token now."""
