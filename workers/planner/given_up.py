"""Notes loads whose callers left before they were served, and has their teams wait longer for the next ones.

Whoever calls a model and leaves at once pays nothing, and another model may have left for it by then. So a team whose
callers do that again and again has the next load begun only for a caller who still waits after a while. Whoever stays,
or leaves once, loses nothing. Does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.protocol.residency import ModelDemand
from workers.residency.picture import Picture
from workers.residency.plan import Plan, Reserve, Start, Stop

REMEMBERED_S = 60.0
"""Seconds for which a load that was given up counts."""
SOON_S = 10.0
"""Callers who have waited longer have not given up: their time was over."""
FREE = 1
"""Number of loads that a team may give up without having to wait for the next one."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
"""Seconds that a caller waits before the next load begins, and at most; each further one doubles it."""
MAX_TEAMS = 4096
"""Maximum number of teams that are remembered."""
MAX_GIVEN_UP = 16


@dataclass(slots=True)
class _Load:
    """A load, or the room that is made for it."""

    teams: tuple[str, ...]
    """The teams whose calls waited when it began."""
    since: float
    waited_at: float
    """When somebody was last seen to wait for it."""


@dataclass(slots=True)
class GivenUp:
    """The loads under way, and the teams that have given some up. Times are of one clock."""

    _loads: dict[str, _Load] = field(default_factory=dict)
    """Model -> its load."""
    _given_up: dict[str, deque[float]] = field(default_factory=dict)
    """Team -> when it gave loads up; those that did so last are at the end."""

    def waits_s(self, now: float) -> dict[str, float]:
        """Return team -> the seconds that one of its callers waits before a load begins; other teams don't wait."""
        found: dict[str, float] = {}
        for team, times in self._given_up.items():
            num_counted = sum(now - at < REMEMBERED_S for at in times)
            if num_counted > FREE:
                found[team] = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (num_counted - FREE - 1))
        return found

    def note(self, picture: Picture, plan: Plan, demand: Mapping[str, ModelDemand], now: float) -> None:
        """Take in a decision: what its picture tells of the loads under way, and the loads that its plan begins."""
        waited_for = {model: told for model, told in demand.items() if told.num_waiting}
        for model, load in [*self._loads.items()]:
            if model in waited_for:
                load.waited_at = now
            elif (is_over := _is_over(picture, model)) is not None:
                del self._loads[model]
                if is_over and load.waited_at - load.since < SOON_S:
                    self._note_given_up(load.teams, now)
        begun = {action.model for action in plan.actions if isinstance(action, Start)}
        begun |= {action.wanted_by for action in plan.actions if isinstance(action, Stop | Reserve)}
        for model in begun & waited_for.keys() - self._loads.keys():
            if teams := waited_for[model].teams:
                self._loads[model] = _Load(teams, now, now)

    def _note_given_up(self, teams: tuple[str, ...], now: float) -> None:
        for team in teams:
            times = self._given_up.pop(team, None) or deque[float](maxlen=MAX_GIVEN_UP)
            times.append(now)
            self._given_up[team] = times
        while (oldest := next(iter(self._given_up), None)) is not None:
            if len(self._given_up) <= MAX_TEAMS and now - self._given_up[oldest][-1] < REMEMBERED_S:
                break
            del self._given_up[oldest]


def _is_over(picture: Picture, model: str) -> bool | None:
    """Return whether the load of a model that nobody waits for has ended unused because its callers left. None: it goes
    on, and may still be used."""
    workers = [worker for worker in picture.workers if worker.model == model and worker.status != "draining"]
    if any(worker.num_taken for worker in workers):
        return False
    if model in picture.unloaded or any(failure.model == model for failure in picture.failures):
        return False
    return None if workers else True
