"""One call of the gateway: its caller, its deadlines, and what ends it early. Its content is in `workers.protocol`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Protocol

from accounts.protocol.records import DEFAULT_ORGANISATION, Limits, Role, SubjectKind
from gateway.errors import PaddockError, RequestTimeout
from workers.protocol.events import CallEvent, Failed, Finished
from workers.protocol.heartbeat import WorkerKind


@dataclass(frozen=True, slots=True)
class CallBounds:
    """The limits that an API key sets for each of its calls."""

    min_priority: int = 0
    """The lowest `priority` number that a call may have; lower numbers are more urgent."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; None: as many as the model's context has room for."""
    answer_timeout_s: float | None = None
    """Maximum seconds from an answer's first token to its end; None: as many as the gateway's settings allow."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whoever limits count for: an organisation, a team, a user, a key, or all callers of an alias together."""

    kind: SubjectKind
    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of an API key. `aliases` is None when the key may use every model."""

    key_id: str
    team: str
    aliases: frozenset[str] | None
    admin: bool
    weight: float = 1.0
    """Share of the team while calls of several teams wait for a model: 3 gets three times as many tokens as 1."""
    bounds: CallBounds = CallBounds()
    organisation: str = DEFAULT_ORGANISATION
    user: str = ""
    """Id of the user whose key it is; empty: it is a service's."""
    role: Role = "user"
    names_end_users: bool = False
    """Whether the key is trusted to name the end user of each call."""
    subjects: tuple[Subject, ...] = ()
    """Those of organisation, team, user and key that have limits."""
    blocked: str = ""
    """Which of them is blocked, such as `The team 'red'`; empty: none."""
    by_token: bool = False
    """Whether it is a user with a token of an identity provider, who has no key: `key_id` only names the calls."""
    of_settings: bool = False
    """Whether the key is one of this gateway's settings, which the accounts service does not know."""

    def may_use(self, alias: str) -> bool:
        return self.aliases is None or alias in self.aliases


class Permit:
    """The permission to compute a call, by the limits and budgets that it counts for. This one has none.

    All answers to one request share its permit."""

    __slots__ = ()

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens of an answer, by the limits of the call's alias; None: no limit."""
        return None

    async def granted(self) -> None:
        """Wait until the call is known to be within its limits. Raises RateLimited, StoreUnavailable."""

    def watch(self, cut: Callable[[PaddockError], None]) -> None:
        """Have `cut` called if the call is refused, from now on until `unwatch`."""

    def unwatch(self, cut: Callable[[PaddockError], None]) -> None:
        """Have `cut` called no more."""

    def check_prompt(self, num_tokens: int) -> None:
        """Check the number of the prompt's tokens, as the worker counts them. Raises ContextOverflow."""


FREE = Permit()


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way through the gateway: immutable, made by `CallResolver.resolve`."""

    request_id: str
    principal: Principal
    alias: str
    """The model name that the caller used."""
    model: str
    """The model whose workers serve the call."""
    received_at: float
    """time.monotonic() when the request arrived."""
    deadline: float
    """time.monotonic() after which nobody waits for the answer any more."""
    queue_deadline: float
    """time.monotonic() after which the call stops waiting for a slot."""
    start_deadline: float = 0.0
    """time.monotonic() until which the call waits for its model's first worker and then a slot; 0: `queue_deadline`."""
    begin_by: float = 0.0
    """Unix time by which the caller wants the answer to begin; 0: the caller named none."""
    adapter: str = ""
    """The LoRA adapter whose name the caller sent as `model`; empty: none."""
    kind: WorkerKind | None = None
    """The kind of worker that the call needs; None: any."""
    fallbacks: tuple[str, ...] = ()
    """Models to try in this order in place of `model`, as long as the answer has not begun."""
    meant_for: str = ""
    """The model that `model` replaces as a fallback; empty: `model` is no fallback."""
    session: str = ""
    """The caller's session: a newer call of the same key and session ends this call. Empty: no newer call ends it."""
    held_bytes: int = 0
    """Bytes of memory that the decoded body takes, estimated from above: the more, the longer its processing takes."""
    unhurried: bool = False
    """Whether nobody waits for the answer, so that the call may stay queued until its deadline."""
    autoload: bool | None = None
    """Whether the call may have its model loaded; None: as the catalog says."""
    permit: Permit = FREE
    """The call's permission by limits and budgets, which must be granted before the call is computed."""

    def waiting(self, now: float, *, queue_s: float, start_s: float) -> Call:
        """Return the call with new limits on its waiting, counted from `now`: `queue_s` for a slot, `start_s` for a
        first worker.

        Neither limit is after the call's deadline; an unhurried call may wait until its deadline."""
        if self.unhurried:
            return replace(self, queue_deadline=self.deadline, start_deadline=self.deadline)
        queue_deadline, start_deadline = min(self.deadline, now + queue_s), min(self.deadline, now + start_s)
        return replace(self, queue_deadline=queue_deadline, start_deadline=start_deadline)

    def on_model(self, model: str) -> Call:
        """Return the call for `model`, one of its fallbacks. Of the fallbacks, only those after `model` remain."""
        later = self.fallbacks[self.fallbacks.index(model) + 1 :]
        return replace(self, model=model, fallbacks=later, meant_for=self.meant_for or self.model)


class Pushed(Enum):
    """Tells what became of events that were pushed to an answer's reader."""

    WRITTEN = "written"
    """The reader is done with them, and more events may be pushed."""
    STALLED = "stalled"
    """The reader has them, but must run to finish: it would wait for its client, or has failed."""
    LEFT = "left"
    """The reader does not have them: it takes them later."""


Push = Callable[[list[CallEvent]], Pushed]
"""Hands events of one answer, which came together, to its reader while the reader waits. Never waits, never raises."""


class Answer(Protocol):
    """The events of a request's answer, or of its several answers (`n`), once the first has begun."""

    @property
    def ended(self) -> bool:
        """Whether the last event of every answer has been taken."""
        ...

    @property
    def choice(self) -> int:
        """Number of the answer whose events the last `take` returned, or whose events are being pushed."""
        ...

    @property
    def end(self) -> Finished | Failed | None:
        """The last event that was taken, if it ended an answer."""
        ...

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        """Wait until an answer has new events, and return them. The last list of each answer ends in `Finished` or
        `Failed`.

        While it waits, each list of events goes to `push` within the turn of the event loop that received it, unless it
        ends an answer. The list returned is empty only if `push` stalled."""
        ...


class Cutoff:
    """An `async with` block that can be interrupted: `cut(error)` cancels what it waits for, and the block raises
    `error`."""

    def __init__(self, deadline: float, limit: str) -> None:
        """The block ends by itself at `deadline`, a time.monotonic(). `limit` names the limit in the error message."""
        self._when = asyncio.get_running_loop().time() + deadline - time.monotonic()
        self._timeout: asyncio.Timeout | None = None
        """Set only while the block runs. It refers to the task, whose exception and frames refer to this object. If it
        were kept longer, this cycle would hold a cut-off call in memory until the garbage collector runs."""
        self._limit = limit
        self._error: PaddockError | None = None

    def limit(self, within_s: float, limit: str) -> None:
        """End the block `within_s` from now, unless it ends sooner; `limit` names the limit. Call this inside the
        block."""
        when = asyncio.get_running_loop().time() + within_s
        if self._timeout is not None and self._error is None and not self._timeout.expired() and when < self._when:
            self._when, self._limit = when, limit
            self._timeout.reschedule(when)

    def cut(self, error: PaddockError) -> None:
        """Interrupt the block with an error. Never waits. Does nothing if the block is interrupted already or has
        ended."""
        if self._timeout is not None and self._error is None and not self._timeout.expired():
            self._error = error
            self._timeout.reschedule(0)

    async def __aenter__(self) -> None:
        self._timeout = await asyncio.timeout_at(self._when).__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            raise RuntimeError("left without being entered")
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._error or RequestTimeout(
                f"The request passed {self._limit}. Ask for fewer tokens or raise the limit."
            ) from None
