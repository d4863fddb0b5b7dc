"""The values that an engine takes and returns (requests, its load, the error of records that disagree), and its intake,
which admits calls.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.cache.prompt import Prompt
from workers.protocol.events import CallFailed, Failure, FailureCode
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
    serves all that are in, teams in turn (`workers.engine.pooled.jobs`)."""


MIN_WAITING_ROOM = 4

DRAINING = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
CRASHED = Failure(FailureCode.INTERNAL, "this worker's engine has crashed; ask again")
NO_MEMORY = Failure(FailureCode.OUT_OF_MEMORY, "this worker has run out of memory and starts anew; send it again")


class Intake:
    """Admits calls to an engine: `slots` calls, and as many more (at least `MIN_WAITING_ROOM`) that wait."""

    def __init__(self, slots: int, beyond: int = 0) -> None:
        """`beyond`: calls that gateways may place although all slots are taken; they always have room to wait."""
        self._slots = slots
        self._room = max(slots, MIN_WAITING_ROOM + beyond)
        # Guards what follows, which must agree: the calls that are alive, and whether more are taken.
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._refusal: Failure | None = None
        self._over = False

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    @property
    def refusal(self) -> Failure:
        """Return why no more calls are taken; calls that are still in when the engine ends get this failure."""
        return self._refusal or CRASHED

    def enter(self, key: int) -> None:
        """Admit a call. Raises CallFailed: BUSY, or why no more calls are taken."""
        with self._lock:
            if self._refusal is not None:
                raise CallFailed(self._refusal)
            if key in self._open:
                raise ValueError(f"call {key} is already in the engine")
            if len(self._open) >= self._slots + self._room:
                raise CallFailed(self._busy())
            self._open.add(key)

    def hand_over(self, key: int, post: Callable[[], None]) -> bool:
        """Post a call that has entered; return False if it was cancelled since or the engine has ended."""
        with self._lock:
            if self._over or key in self._cancelled:
                return False
            post()
            return True

    def leave(self, key: int) -> None:
        with self._lock:
            self._open.discard(key)

    def cancel(self, key: int, post: Callable[[], None]) -> bool:
        """Post the end of a call that is in the engine; return whether it is in."""
        with self._lock:
            if key not in self._open:
                return False
            self._cancelled.add(key)
            post()
            return True

    def take_cancelled(self) -> frozenset[int]:
        """Return the cancelled calls, which emit nothing more; those that have left since are forgotten."""
        if not self._cancelled:
            return frozenset()
        with self._lock:
            cancelled = frozenset(self._cancelled)
            self._cancelled &= self._open
        return cancelled

    def drain(self) -> None:
        with self._lock:
            self._refusal = self._refusal or DRAINING

    def crash(self, error: BaseException) -> None:
        """Refuse calls from now on, since the engine has ended with this error."""
        with self._lock:
            self._refusal = NO_MEMORY if isinstance(error, MemoryError) else CRASHED

    def end(self) -> bool:
        """Hand over nothing from now on; return whether this is the first call."""
        with self._lock:
            first, self._over = not self._over, True
            return first

    @property
    def is_over(self) -> bool:
        return self._over

    def _busy(self) -> Failure:
        message = (
            f"all {self._slots} slots and the waiting room for {self._room} are taken; ask again, or serve with more "
            "--slots"
        )
        return Failure(FailureCode.BUSY, message)
