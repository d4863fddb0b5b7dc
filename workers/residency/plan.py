"""The plan that is decided: what to start and what leaves, what waits, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from workers.protocol.residency import Why
from workers.residency.picture import Share

WaitReason = Literal[
    "freeing", "turn", "busy", "resident", "others", "no_room", "too_large", "failed", "autoload", "unloaded"
]
"""Why a model is not loaded yet.

    freeing    memory that others leave is kept for it
    turn       room is made for others first, and for this one in the next decision; or its callers have left loads, and
               it waits for one who stays
    busy       all that could leave have calls, or were loaded a moment ago
    resident   what could leave was loaded a moment ago, or its memory is promised to others
    others     other programs have the memory
    no_room    what is loaded stays, by `min`, `pinned` or a group
    too_large  no machine has so much memory for one worker
    failed     it failed to load a moment ago
    autoload   only an admin loads it
    unloaded   an admin has unloaded it
"""

HOPELESS = frozenset[WaitReason]({"no_room", "too_large", "autoload", "unloaded"})
"""Reasons that waiting alone does not change, so that callers are better told at once."""

CLOSED = frozenset[WaitReason]({"no_room", "too_large"})
"""Those that another call does not change either, so that it is refused without the planner having heard of it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker. The memory is free now."""

    model: str
    machine: str
    shares: tuple[Share, ...]
    why: Why
    replaces: str = ""
    """Id of the stale worker whose place it takes: that one leaves once this one is ready. Empty: it takes nobody's."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a worker that has no calls, or that is still loading. One that got a call meanwhile is not stopped: ask
    again."""

    worker: str
    model: str
    frees: tuple[Share, ...]
    why: Why
    wanted_by: str = ""
    """The model that takes its place; empty: it leaves for its own reasons."""
    sleeps: bool = False
    """Whether the model's weights are to stay in main memory, as far as that is not needed when it leaves."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a worker's calls end, then stop it; it does not come back."""

    worker: str
    model: str
    why: Why


@dataclass(frozen=True, slots=True)
class Reserve:
    """Give a worker no new calls, so that it becomes free for another model, or for its successor of the same model."""

    worker: str
    model: str
    wanted_by: str
    why: Why


@dataclass(frozen=True, slots=True)
class Release:
    """Give a reserved worker calls again: nobody wants its place any more."""

    worker: str
    model: str
    why: Why


@dataclass(frozen=True, slots=True)
class Wait:
    """A model is wanted and does not load now."""

    model: str
    reason: WaitReason
    why: Why
    until: float | None = None
    """When time alone changes this; None: something has to happen."""


Action = Start | Stop | Drain | Reserve | Release | Wait


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions in the order in which they were decided. Those that do not wait are to be taken now."""

    actions: tuple[Action, ...]
    ask_again_at: float | None = None
    """When to decide again though nothing happens; None: when something does. It can be the moment of the plan itself:
    then at once, when its actions are taken."""
    wanted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> the workers that it should have, whether or not there is memory for them: those that are there or load,
    and those that `min`, calls that wait or long waits ask for. Calls that run say nothing."""
    closed: tuple[Wait, ...] = ()
    """The unloaded models that nobody calls, and that no call could have loaded (`CLOSED`), each with the reason."""

    def starts(self) -> Iterator[Start]:
        return (action for action in self.actions if isinstance(action, Start))

    def waits(self) -> Iterator[Wait]:
        return (action for action in self.actions if isinstance(action, Wait))

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do now."""
        return all(isinstance(action, Wait) for action in self.actions)
