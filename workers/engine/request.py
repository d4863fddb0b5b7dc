"""The values that an engine takes and returns (requests, its load, `IntegrityError`), and the intake that admits calls
to it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.cache.prompt import Prompt
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Sampling


class TokenMask(Protocol):
    """Tells which tokens of an answer may come next. Must be quick: the engine's thread calls it for each token."""

    def permits(self, token: int) -> bool:
        """Return whether `token`, drawn from all tokens, may come next. If not, another is drawn from `allowed`."""

    def allowed(self) -> NDArray[np.uint32] | None:
        """Return the allowed tokens: bit t % 32 of word t // 32 is set for token t; None: all. Valid until `accept`."""

    def accept(self, token: int) -> None:
        """Note that `token` is the answer's next token. Raises CallFailed if the mask does not permit it."""

    def forced(self) -> Sequence[int]:
        """Return tokens of the text that must come next, as a guess at how it is spelled; empty: not known."""

    @property
    def is_done(self) -> bool:
        """Return whether the answer must end here."""


class IntegrityError(RuntimeError):
    """Raised if the engine's own records disagree with llama.cpp's cache, or with each other."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A tokenised call."""

    key: int
    """Number of the call within this engine; never used twice."""
    asked: GenerateRequest
    """The caller's request as it came; but the engine uses `prompt` and `sampling` below instead of those in it."""
    prompt: Prompt
    sampling: Sampling
    """Sampling parameters; None fields stand for llama-server's defaults."""
    label: str = ""
    """Name of the call in log lines."""
    tenant: str = ""
    """The caller's team: only calls of the same team share cached prefixes."""
    weight: float = 1.0
    """The team's weight in sharing the slots with other teams."""
    num_public: int = 0
    """Number of leading tokens that are from a prompt marked shareable in the catalog: all teams share their KV."""
    deadline: float = math.inf
    """Deadline, `time.monotonic` seconds; orders calls of one priority."""
    written: Mapping[int, bytes] = field(default_factory=dict)
    """Control tokens that appear in the answer's text even if `asked.special` is not set, each with its text."""
    prediction: Sequence[int] = ()
    """Tokens that the caller expects the answer to have."""
    mask: TokenMask | None = None
    """Which tokens the answer may have; the mask belongs to this call alone. None: all tokens."""

    @property
    def has_hooks(self) -> bool:
        """Return whether `workers.engine.step.token_hooks` must handle each token of the call."""
        asked = self.asked
        return "tokens" in asked.tell or "timings" in asked.tell or asked.max_predict_ms > 0 or asked.n_indent > 0


@dataclass(frozen=True, slots=True)
class CallLeft:
    """How many tokens are still to be computed for a call that has a slot."""

    num_prompt: int
    """Number of tokens to compute before the next token of the call's answer."""
    num_answer: float
    """Estimated number of tokens that the call's answer will still get."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    slots: int
    slots_busy: int
    waiting: int
    """Accepted calls that hold no slot yet."""
    kv_tokens: int
    kv_tokens_used: int
    """KV cells of calls that have a slot. Cells of idle prefixes do not count, since new calls can evict them."""
    backlog_tokens: int = 0
    """Number of prompt tokens, of all calls, that are not computed yet."""
    running: tuple[CallLeft, ...] = ()
    answer_tokens: float = 0.0
    """Length, in tokens, that one answer in ten exceeds; 0: not known yet."""
    prefill_s: float = 0.0
    """Seconds that computing a prompt token takes; 0: not known yet."""
    encode_s: float = 0.0
    """Seconds that making the embedding of a picture's or sound's cell takes; 0: not known yet."""
    overdraft: int = 0
    """Number of calls that gateways may send beyond the slots if several teams have calls. The engine gives slots to
    teams in turn (`workers.engine.step.shares`), or serves teams in turn (`workers.engine.pooled.jobs`)."""


MIN_WAITING_ROOM = 4

DRAINING = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
CRASHED = Failure(FailureCode.INTERNAL, "this worker's engine has crashed; ask again")
NO_MEMORY = Failure(FailureCode.OUT_OF_MEMORY, "this worker has run out of memory and starts anew; send it again")


class Intake:
    """Admits calls to an engine: `slots` calls, and max(`slots`, `MIN_WAITING_ROOM` + `beyond`) more that wait."""

    def __init__(self, slots: int, beyond: int = 0) -> None:
        """`beyond`: calls that gateways may send although all slots are taken; they always find room to wait."""
        self._slots = slots
        self._room = max(slots, MIN_WAITING_ROOM + beyond)
        # Guards the fields below, which must agree: the calls in the engine, and whether it takes more.
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
        """Return why the engine takes no more calls. Calls that are open when the engine ends get this failure."""
        return self._refusal or CRASHED

    def enter(self, key: int) -> None:
        """Admit a call. Raises CallFailed: the `refusal` if the engine takes no more calls, BUSY if too many wait."""
        with self._lock:
            if self._refusal is not None:
                raise CallFailed(self._refusal)
            if key in self._open:
                raise ValueError(f"call {key} is already in the engine")
            if len(self._open) >= self._slots + self._room:
                raise CallFailed(self._busy())
            self._open.add(key)

    def hand_over(self, key: int, post: Callable[[], None]) -> bool:
        """Call `post` to pass an entered call on. Return False instead if it is cancelled or the engine has ended."""
        with self._lock:
            if self._over or key in self._cancelled:
                return False
            post()
            return True

    def leave(self, key: int) -> None:
        with self._lock:
            self._open.discard(key)

    def cancel(self, key: int, post: Callable[[], None]) -> bool:
        """Mark a call as cancelled and call `post`. Do neither, and return False, if the call is not in the engine."""
        with self._lock:
            if key not in self._open:
                return False
            self._cancelled.add(key)
            post()
            return True

    def take_cancelled(self) -> frozenset[int]:
        """Return the keys of cancelled calls; their events are to be dropped. Forget keys of calls that are over."""
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
        """Refuse calls from now on because the engine has ended with this error."""
        with self._lock:
            self._refusal = NO_MEMORY if isinstance(error, MemoryError) else CRASHED

    def end(self) -> bool:
        """Make `hand_over` post nothing from now on; return False if this was done before."""
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
