"""What goes into the engine, and what it says of its load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.protocol.requests import AdapterUse, Notice, Sampling


class TokenMask(Protocol):
    """Which tokens may come next. Used by the engine's thread only, and quick: it is asked once per token."""

    def permits(self, token: int) -> bool:
        """Whether `token` may come next: asked of one that was drawn from all, before `allowed` is needed."""

    def allowed(self) -> NDArray[np.uint32] | None:
        """Bit t % 32 of word t // 32 tells whether token t may come; None: all may. Valid until `accept`."""

    def accept(self, token: int) -> None:
        """`token` came. Raises CallFailed where it could not."""

    @property
    def is_done(self) -> bool:
        """Nothing but the end can follow."""


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
    tenant: str = ""
    """Trust line of everything cached: only calls of one team share."""
    weight: float = 1.0
    """What the team is owed of the slots, beside other teams."""
    salt: str = ""
    """The caller's `cache_salt`: of one team, only calls with the same one share."""
    num_public: int = 0
    """Tokens at the beginning that come from a prompt which the catalog marks shareable: they have no salt."""
    cache_prompt: bool = True
    adapters: tuple[AdapterUse, ...] = ()
    priority: int = 0
    deadline: float = math.inf
    """`time.monotonic` seconds; orders calls of one priority."""
    context_shift: bool = False
    n_keep: int = 0
    n_probs: int = 0
    tells_prompt: bool = False
    """The probabilities of the prompt's tokens are told; needs `n_probs`, and no `cache_prompt`."""
    post_sampling_probs: bool = False
    special: bool = False
    """Control tokens are written into the text."""
    written: Mapping[int, bytes] = field(default_factory=dict)
    """Those that are in any case, with their texts."""
    stop_tokens: tuple[int, ...] = ()
    """They end the answer as the model's end tokens do, and are never written."""
    min_tokens: int = 0
    """Neither these nor end tokens come before so many, but where the mask leaves nothing else."""
    mask: TokenMask | None = None
    """What the answer is constrained by; one call's own."""
    max_predict_ms: int = 0
    """The answer ends at the first line end that comes so long after its first token; 0: no bound."""
    n_indent: int = 0
    """The answer ends before the first line after its first that begins with fewer blanks; 0: no bound."""
    slot: int = -1
    """Taken if it is free when the call enters; -1: any."""
    tell: tuple[Notice, ...] = ()
    """`settings` is not for engines: they emit the other three."""

    @property
    def is_watched(self) -> bool:
        """Something is to be done after each of its tokens that is not done for others."""
        return "tokens" in self.tell or "timings" in self.tell or self.max_predict_ms > 0 or self.n_indent > 0


@dataclass(frozen=True, slots=True)
class CallLeft:
    """What a call with a slot has before it. Tokens."""

    num_prompt: int
    """To be computed before its next token comes."""
    num_predicted: int
    """Of its answer so far."""
    limit: int
    """Of its answer, at most."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    slots: int
    slots_busy: int
    waiting: int
    """Calls that are accepted and hold no slot yet."""
    kv_tokens: int
    kv_tokens_used: int
    """Cells that calls with a slot hold; cells of idle prefixes give way to new calls and do not count."""
    backlog_tokens: int = 0
    """Prompt tokens of all calls that are not computed yet."""
    running: tuple[CallLeft, ...] = ()
    prefill_s: float = 0.0
    """What a token of a prompt takes; 0: not known yet."""
    overdraft: int = 0
    """Calls beyond its slots that may be in it, where teams share them: it slices (`workers.engine.shares`)."""
