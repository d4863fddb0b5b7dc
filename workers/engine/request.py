"""The engine's input, a request, and its report of its load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.protocol.requests import AdapterUse, Notice, Sampling


class TokenMask(Protocol):
    """Tells which tokens may come next. The engine's thread only uses it, once per token, so it must be quick."""

    def permits(self, token: int) -> bool:
        """Return whether `token`, drawn from all, may come next. Asked before `allowed` is needed."""

    def allowed(self) -> NDArray[np.uint32] | None:
        """Return whether token t may come as bit t % 32 of word t // 32; None: all may. Valid until `accept`."""

    def accept(self, token: int) -> None:
        """Note that `token` came. Raises CallFailed where it could not."""

    @property
    def is_done(self) -> bool:
        """Return whether nothing but the end can follow."""


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
    """Sampling parameters; None fields stand for llama-server's defaults."""
    ignore_eos: bool = False
    label: str = ""
    """Name of the call in log lines."""
    tenant: str = ""
    """Team: only calls of one team share what is cached."""
    weight: float = 1.0
    """The team's weight in sharing the slots with other teams."""
    salt: str = ""
    """The caller's `cache_salt`: of one team's calls only those with the same salt share."""
    num_public: int = 0
    """Tokens at the beginning that come from a prompt which the catalog marks shareable: they have no salt."""
    cache_prompt: bool = True
    adapters: tuple[AdapterUse, ...] = ()
    priority: int = 0
    deadline: float = math.inf
    """Deadline, `time.monotonic` seconds; orders calls of one priority."""
    context_shift: bool = False
    n_keep: int = 0
    n_probs: int = 0
    tells_prompt: bool = False
    """Whether the probabilities of the prompt's tokens are told; needs `n_probs`, and no `cache_prompt`."""
    post_sampling_probs: bool = False
    special: bool = False
    """Whether control tokens are written into the text."""
    written: Mapping[int, bytes] = field(default_factory=dict)
    """Control tokens that are written in any case, with their texts."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the answer as the model's end tokens do; they are never written."""
    min_tokens: int = 0
    """Tokens of the answer before a stop or end token may come, unless the mask leaves nothing else."""
    mask: TokenMask | None = None
    """The constraint of the answer; it belongs to this call alone."""
    max_predict_ms: int = 0
    """The answer ends at the first line end that comes so long after its first token; 0: no bound."""
    n_indent: int = 0
    """The answer ends before the first line after its first that begins with fewer blanks; 0: no bound."""
    slot: int = -1
    """Wanted slot, taken if it is free when the call enters; -1: any."""
    tell: tuple[Notice, ...] = ()
    """Notices that the caller wants. Engines emit all kinds but `settings`."""

    @property
    def is_watched(self) -> bool:
        """Return whether each token of the call needs the extra work of `workers.engine.notices`."""
        return "tokens" in self.tell or "timings" in self.tell or self.max_predict_ms > 0 or self.n_indent > 0


@dataclass(frozen=True, slots=True)
class CallLeft:
    """The tokens that a call with a slot has left."""

    num_prompt: int
    """Tokens to compute before its next token comes."""
    num_predicted: int
    """Tokens of its answer so far."""
    limit: int
    """Most tokens of its answer."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    slots: int
    slots_busy: int
    waiting: int
    """Accepted calls that hold no slot yet."""
    kv_tokens: int
    kv_tokens_used: int
    """Cells that calls with a slot hold; cells of idle prefixes can be evicted for new calls and do not count."""
    backlog_tokens: int = 0
    """Prompt tokens of all calls that are not computed yet."""
    running: tuple[CallLeft, ...] = ()
    prefill_s: float = 0.0
    """Seconds of computing a prompt token; 0: not known yet."""
    overdraft: int = 0
    """Calls beyond its slots that may be in it, where teams share them: it slices (`workers.engine.shares`), or serves
    all that are in, teams in turn (`workers.engine.pooled_plan`)."""
