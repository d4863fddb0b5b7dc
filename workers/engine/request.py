"""The values that an engine takes and tells: requests, its load, and the error of records that disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.cache.prompt import Prompt
from workers.protocol.requests import GenerateRequest, Sampling


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


class IntegrityError(RuntimeError):
    """The engine's own records and llama.cpp's cache disagree."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One call, tokenised."""

    key: int
    """Number of the call in this engine, never used twice."""
    asked: GenerateRequest
    """The caller's request, as it came; in place of its messages and sampling parameters the engine reads these:"""
    prompt: Prompt
    sampling: Sampling
    """Sampling parameters; None fields stand for llama-server's defaults."""
    label: str = ""
    """Name of the call in log lines."""
    tenant: str = ""
    """Team: only calls of one team share what is cached."""
    weight: float = 1.0
    """The team's weight in sharing the slots with other teams."""
    num_public: int = 0
    """Tokens at the beginning that come from a prompt which the catalog marks shareable: they have no salt."""
    deadline: float = math.inf
    """Deadline, `time.monotonic` seconds; orders calls of one priority."""
    written: Mapping[int, bytes] = field(default_factory=dict)
    """Control tokens that are written in any case, with their texts."""
    mask: TokenMask | None = None
    """The constraint of the answer; it belongs to this call alone."""

    @property
    def has_hooks(self) -> bool:
        """Return whether each token of the call needs the extra work of `workers.engine.step.token_hooks`."""
        asked = self.asked
        return "tokens" in asked.tell or "timings" in asked.tell or asked.max_predict_ms > 0 or asked.n_indent > 0


@dataclass(frozen=True, slots=True)
class CallLeft:
    """The tokens that a call with a slot has left."""

    num_prompt: int
    """Tokens to compute before its next token comes."""
    num_answer: float
    """Tokens that its answer still takes, an estimate."""


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
    answer_tokens: float = 0.0
    """Length that one answer in ten exceeds, tokens; 0: not known yet."""
    prefill_s: float = 0.0
    """Seconds of computing a prompt token; 0: not known yet."""
    overdraft: int = 0
    """Calls beyond its slots that may be in it, where teams share them: it slices (`workers.engine.step.shares`), or
    serves all that are in, teams in turn (`workers.engine.pooled.plan`)."""
