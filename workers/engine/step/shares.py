"""Shares an engine's slots among teams: decides which call gives its slot to another team's call. Pure decisions.

Each team with calls is owed a share of the slots by its weight. Gateways keep to the shares when they place calls, and
this module does so while calls run: a call of a team that has less than its share takes the slot of a call of a team
that has more, once that call has had its slice (`SLICE_TOKENS`, `SLICE_S`). The preempted call waits, its cells kept,
and continues later where it was. While all calls are of one team, none is preempted for another.

Which call is preempted is decided by attained service (Nuyens, Wierman, "The foreground-background queue", 2008): of
the team that has most, the call with the longest answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

SLICE_TOKENS = 64
"""A slice is this many tokens of an answer, or `SLICE_S`, whichever is sooner; after it the call can be preempted."""
SLICE_S = 1.0
"""Seconds of an answer after which a slice is over, even if it had fewer than `SLICE_TOKENS` tokens."""
FIRST_SLICE = 0.1
"""Part of a slice after which a call must give its slot to a team without a slot, which can't begin an answer."""
RETURN_SHARE = 0.2
"""Maximum part of a slice that bringing the call back from a preemption may have taken: else the slice is longer."""
LONGEST_SLICE_S = 10.0
MIN_OVERDRAFT = 8
"""Minimum number of calls that an engine takes beyond its slots, so that teams can share the slots."""


class Sharer(Protocol):
    """The attributes of a call that this module needs. All times are seconds of the same clock."""

    @property
    def team(self) -> str: ...
    @property
    def weight(self) -> float:
        """Return the weight of the call's team."""
        ...

    @property
    def order(self) -> tuple[float, float, int]:
        """Return priority class, deadline and number; the smallest goes first."""
        ...

    @property
    def waits_since(self) -> float:
        """Return when the call, if it waits, began to wait for a slot."""
        ...

    @property
    def num_predicted(self) -> int:
        """Return the number of tokens of the call's answer so far."""
        ...


S = TypeVar("S", bound=Sharer)


@dataclass(slots=True)
class TimeSlice:
    """The service that a call has received since it last got a slot."""

    entered_at: float = 0.0
    """When the call got the slot."""
    resumed_at: float = 0.0
    """When the call's answer began or continued in this slot; 0: not yet, the prompt is still being computed."""
    return_s: float = 0.0
    """Seconds from getting the slot to the next token, if the call was preempted within its answer before; else 0."""
    num_before: int = 0
    """Number of tokens that the call's answer had when the call got the slot."""
    num_cut: int = 0
    """Times in a row that the call was preempted before its answer began or continued."""

    def enter(self, now: float, num_predicted: int) -> None:
        self.entered_at, self.resumed_at, self.num_before = now, 0.0, num_predicted

    def resume(self, now: float, *, again: bool) -> None:
        """Record that the first token since the call got the slot has come. `again`: it is not the answer's first."""
        self.resumed_at, self.num_cut = now, 0
        self.return_s = now - self.entered_at if again else 0.0

    def is_over(self, now: float, num_predicted: int, *, keeps_prompt: bool, part: float = 1.0) -> bool:
        """Return whether the call has had its slice, or `part` of it, and can be preempted.

        `keeps_prompt`: whether a preempted call keeps the part of its prompt that has been computed."""
        if not self.resumed_at:
            # The slice doubles each time: so even if all of the prompt is lost each time, the call gets to its answer,
            # after computing less than three times as much as it has to.
            slice_s = SLICE_S * part if keeps_prompt else LONGEST_SLICE_S
            return now - self.entered_at >= math.ldexp(slice_s, self.num_cut)
        ran_s = now - self.resumed_at
        if ran_s < min(LONGEST_SLICE_S, self.return_s / RETURN_SHARE):
            return False
        return ran_s >= SLICE_S * part or num_predicted - self.num_before >= SLICE_TOKENS * part


def overdraft_of(slots: int) -> int:
    """Return how many calls beyond its slots an engine takes, for teams that have less than their share."""
    return max(slots, MIN_OVERDRAFT)


def is_shared(running: Iterable[Sharer], waiting: Iterable[Sharer]) -> bool:
    """Return whether the calls are of more than one team."""
    teams = {one.team for one in running}
    teams.update(one.team for one in waiting)
    return len(teams) > 1


def next_in(waiting: Collection[S], running: Collection[Sharer]) -> S:
    """Return the waiting call that is admitted next: one of those that are first in `order` among their team's calls.

    Teams without a slot come first; among them, the call that has waited longest. If all teams have slots, the most
    urgent priority class comes first; within it, the team with the fewest slots for its weight."""
    held = _held(running)

    def turn(one: S) -> tuple[bool, float, float, tuple[float, float, int]]:
        share = held.get(one.team, 0.0)
        return (True, one.order[0], share, one.order) if share else (False, one.waits_since, 0.0, one.order)

    firsts: dict[str, S] = {}
    for one in sorted(waiting, key=lambda one: one.order):
        firsts.setdefault(one.team, one)
    return min(firsts.values(), key=turn)


def gives_way(running: Collection[S], newcomer: Sharer, has_had_slice: Callable[[S], bool]) -> S | None:
    """Return the call whose slot the newcomer takes; None: no call has to give it a slot, or none has had its slice.

    If the newcomer's team has no slot, a call of any other team can give way. Otherwise, a call gives way only if it is
    no more urgent, and its team has more slots for its weight than the newcomer's team would have with one slot more.
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
    """Return whether a newcomer must not overtake a waiting call that found no room. That is so if the call is of
    the newcomer's own team, or of a team with fewer slots for its weight."""
    held = _held(running)
    return waiting.team == newcomer.team or held.get(waiting.team, 0.0) < held.get(newcomer.team, 0.0)


def last_of(holders: Collection[S]) -> S:
    """Return the call to preempt when cells run out: the last in `order` of the team with most slots for its weight."""
    held = _held(holders)
    return max(holders, key=lambda one: (held[one.team], one.order))


def _held(running: Iterable[Sharer]) -> Mapping[str, float]:
    """Return each team's number of slots divided by its weight."""
    held: dict[str, float] = {}
    for one in running:
        held[one.team] = held.get(one.team, 0.0) + 1 / one.weight
    return held
