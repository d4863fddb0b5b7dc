"""Sharing the slots among teams: which call gives its slot up where several teams are in one engine, a pure decision.

Each team with work is owed slots by its weight. A gateway's queue ensures that as calls come, this module while they
run: a call of a team that is owed more takes the slot of a team that has more, once the call there has had its slice.
The preempted call waits, its cells kept, and goes on later where it was. Calls of one team alone are never sliced.

Attained service decides which call gives way (Nuyens, Wierman, "The foreground-background queue", 2008): of the team
that has most, the call that has the longest answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

SLICE_TOKENS = 64
"""A slice: tokens of an answer after which its call may give way, if they come sooner than `SLICE_S`."""
SLICE_S = 1.0
"""A slice: seconds of an answer after which its call may give way, if they pass sooner than `SLICE_TOKENS`."""
FIRST_SLICE = 0.1
"""Part of a slice after which a call gives way to a team that has no slot, whose first token waits for it."""
RETURN_SHARE = 0.2
"""Part of a slice's time that coming back may take: where that takes long, slices are longer."""
LONGEST_SLICE_S = 10.0
MIN_OVERDRAFT = 8
"""Calls that an engine takes beyond its slots, for teams to take turns; as many as slots if it has more slots."""


class Sharer(Protocol):
    """A call, as far as this module must know it. Times are seconds of any one clock."""

    @property
    def team(self) -> str: ...
    @property
    def weight(self) -> float:
        """Return the weight of its team."""
        ...

    @property
    def order(self) -> tuple[float, float, int]:
        """Return priority class, deadline and number; the smallest goes first."""
        ...

    @property
    def waits_since(self) -> float:
        """Return when a waiting call began to wait for a slot."""
        ...

    @property
    def num_predicted(self) -> int:
        """Return the tokens of its answer so far."""
        ...


S = TypeVar("S", bound=Sharer)


@dataclass(slots=True)
class TimeSlice:
    """The service of a call since it last took a slot."""

    entered_at: float = 0.0
    resumed_at: float = 0.0
    """When its answer began, or went on; 0: its prompt is being computed."""
    return_s: float = 0.0
    """Seconds from taking the slot to the next token, of a call that gave way before."""
    num_before: int = 0
    """Tokens of its answer when it took the slot."""
    num_cut: int = 0
    """Times that it gave way before its answer went on."""

    def enter(self, now: float, num_predicted: int) -> None:
        self.entered_at, self.resumed_at, self.num_before = now, 0.0, num_predicted

    def resume(self, now: float, *, again: bool) -> None:
        """Note that a token has come. `again`: not the answer's first one."""
        self.resumed_at, self.num_cut = now, 0
        self.return_s = now - self.entered_at if again else 0.0

    def is_over(self, now: float, num_predicted: int, *, keeps_prompt: bool, part: float = 1.0) -> bool:
        """Return whether the call may give way.

        `keeps_prompt`: nothing computed of a prompt would be lost. `part`: the part of a slice that is enough.
        """
        if not self.resumed_at:
            # Twice as long each time: whatever is lost and read again, it gets to its answer some day, and reads less
            # than three times as much as it has to.
            slice_s = SLICE_S * part if keeps_prompt else LONGEST_SLICE_S
            return now - self.entered_at >= math.ldexp(slice_s, self.num_cut)
        ran_s = now - self.resumed_at
        if ran_s < min(LONGEST_SLICE_S, self.return_s / RETURN_SHARE):
            return False
        return ran_s >= SLICE_S * part or num_predicted - self.num_before >= SLICE_TOKENS * part


def overdraft_of(slots: int) -> int:
    """Return how many calls beyond its slots an engine takes for teams that have less than their share."""
    return max(slots, MIN_OVERDRAFT)


def is_shared(running: Iterable[Sharer], waiting: Iterable[Sharer]) -> bool:
    """Return whether calls of several teams are there."""
    teams = {one.team for one in running}
    teams.update(one.team for one in waiting)
    return len(teams) > 1


def next_in(waiting: Collection[S], running: Collection[Sharer]) -> S:
    """Return the waiting call that is admitted next: the first in order, where all are of one team.

    Else a team without a slot goes first, of several the one that has waited longest; then the more urgent class, and
    of one class the team that has least for its weight.
    """
    held = _held(running)

    def turn(one: S) -> tuple[bool, float, float, tuple[float, float, int]]:
        share = held.get(one.team, 0.0)
        return (True, one.order[0], share, one.order) if share else (False, one.waits_since, 0.0, one.order)

    firsts: dict[str, S] = {}
    for one in sorted(waiting, key=lambda one: one.order):
        firsts.setdefault(one.team, one)
    return min(firsts.values(), key=turn)


def gives_way(running: Collection[S], newcomer: Sharer, has_had_slice: Callable[[S], bool]) -> S | None:
    """Return the call whose slot the newcomer takes; None: no call owes it one, or none has had its slice yet.

    A team without a slot is owed one by all others. A team with some gets more from calls no more urgent than its own,
    of teams that would still have more than it.
    """
    held = _held(running)
    mine = held.get(newcomer.team, 0.0)
    found: S | None = None
    best = (0.0, 0.0, 0)
    for one in running:
        if one.team == newcomer.team:
            continue
        if mine and (held[one.team] <= mine + 1 / newcomer.weight or one.order[0] < newcomer.order[0]):
            continue
        rank = (held[one.team], one.order[0], one.num_predicted)
        if (found is None or rank > best) and has_had_slice(one):
            found, best = one, rank
    return found


def goes_before(waiting: Sharer, newcomer: Sharer, running: Iterable[Sharer]) -> bool:
    """Return whether a call that found no room holds back a later one, which is of its team or of one with more."""
    held = _held(running)
    return waiting.team == newcomer.team or held.get(waiting.team, 0.0) < held.get(newcomer.team, 0.0)


def last_of(holders: Collection[S]) -> S:
    """Return the call that is preempted when cells run out: the last of the team that has most for its weight."""
    held = _held(holders)
    return max(holders, key=lambda one: (held[one.team], one.order))


def _held(running: Iterable[Sharer]) -> Mapping[str, float]:
    """Return each team's number of slots divided by its weight."""
    held: dict[str, float] = {}
    for one in running:
        held[one.team] = held.get(one.team, 0.0) + 1 / one.weight
    return held
