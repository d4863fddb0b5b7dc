"""Chooses the adapters of the next step, since all rows of one `llama_decode` share their adapters. Pure decisions.

Calls with the same adapters and scales (`AdapterSet`) are a group. Teams take turns, and a team's turn goes to its
group that has waited longest: a team that makes many groups delays only its own calls. The turn of a group computes
its calls of all teams, and counts as the turn of each team that would have chosen this group next.

Switching adapters makes llama.cpp lay out its graphs anew, so a turn has several steps if a switch is slow compared to
a step. One caller with an adapter of their own does not halve the pace of fifteen others: a group's turn grows with its
share of the callers. Both effects are bounded, in steps and in time.

Measured once each on one core, one caller, rank 8 or 16 on seven matrices of each layer: a switch adds 0.8 to 1.0 ms to
a step of the demo model (0.25 ms), 4.2 to 4.4 ms to one of a 0.5 B model (23 ms). With eight callers: in the noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from workers.llama.adapters import Adapter, AdapterFile
from workers.protocol.queries import AdapterInfo, AdapterState

SHARE = 0.1
"""Share of a turn's time that switching adapters may take: a turn gets enough steps for that, up to `MOST_STEPS`."""

FEWEST_STEPS = 2
"""Minimum steps of a turn: the first includes the switch, the second shows how long a step takes without it."""

MOST_STEPS = 16
"""Maximum steps of a turn while others wait. If a team has k sets of adapters, none waits for more than k - 1 turns."""

WAIT_S = 0.25
"""Seconds within which every group (calls with the same adapters) of a team should get a turn. So a turn ends after an
equal part of these seconds, but not before its first step has ended."""

TEAM_WAIT_S = 0.06
"""Maximum seconds that other teams wait: if they wait for n sets of adapters, a turn takes at most 1/n of this."""

_WEIGHT = 0.3
"""Weight of the newest measurement in a running mean; the mean of those before it has the remaining weight."""

K = TypeVar("K")


class AdapterUser(Protocol):
    @property
    def adapter_set(self) -> Keyed: ...

    @property
    def team(self) -> str: ...


class Keyed(Protocol):
    @property
    def key(self) -> bytes: ...


S = TypeVar("S", bound=AdapterUser)

Callers = Mapping[K, Mapping[str, int]]
"""Group (calls with the same adapters) -> team -> number of the team's callers in the group, at least one."""


class AdapterTurns(Generic[K]):
    """Decides which group (calls with the same adapters) the next step computes. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.switch_s = 0.0
        """Seconds that a switch of adapters adds to a step; 0: not known yet."""
        self.step_s = 0.0
        """Seconds of a step without a switch of adapters; 0: not known yet."""
        self._current: K | None = None
        self._holder = ""
        """The team whose turn it is."""
        self._groups: dict[K, None] = {}
        """The groups (calls with the same adapters) in the order of their turns: the longest waiting one first."""
        self._teams: dict[str, None] = {}
        """The teams that have callers, in the order of their turns."""
        self._num_steps = 0
        self._since = 0.0
        self._first_s = 0.0
        """Seconds of the turn's first step if adapters were switched in it; else 0."""
        self._last_s = 0.0
        """Seconds of the turn's last step, less the time of a switch of adapters in it."""

    def choose(self, callers: Callers[K], now: float) -> K:
        """Return the group (calls with the same adapters) to compute next. `callers` must not be empty. Idempotent."""
        self._groups = _present(self._groups, callers)
        self._teams = _present(self._teams, (team for teams in callers.values() for team in teams))
        claims = self._claims(callers)
        current = self._current
        if current is not None:
            if current in callers and not self._is_over(current, callers, claims, now):
                return current
            # A team whose group has ended had its turn too: otherwise, groups of one step would keep all others out.
            for team in [team for team in self._teams if team == self._holder or claims[team] == current]:
                _move_back(self._teams, team)
            _move_back(self._groups, current)
            claims = self._claims(callers)
        self._holder = next(iter(self._teams))
        current = self._current = claims[self._holder]
        self._num_steps, self._since, self._first_s, self._last_s = 0, now, 0.0, 0.0
        return current

    def note_step(self, seconds: float, *, switched: bool, comparable: bool = True) -> None:
        """Update the mean times of a step and of a switch of adapters from one step's time. `switched`: adapters were
        switched in it. `comparable`: it computed no prompts, so its time can be compared with that of other steps."""
        self._num_steps += 1
        self._last_s = max(0.0, seconds - self.switch_s * switched)
        if not comparable:
            self._first_s = 0.0
        elif switched:
            self._first_s = seconds if self._num_steps == 1 else 0.0
        else:
            self.step_s = _mean(self.step_s, seconds)
            if self._first_s:
                self.switch_s = _mean(self.switch_s, max(0.0, self._first_s - seconds))
                self._first_s = 0.0

    def length(self, group: K, callers: Callers[K], rivals: Collection[str] = ()) -> int:
        """Return how many steps a turn of `group` (calls with the same adapters) has. `rivals`: the other teams that
        wait; empty: only other groups of the same team wait."""
        worth = math.ceil(self.switch_s / (SHARE * self.step_s)) if self.step_s else 0
        others = [
            sum(count for team, count in teams.items() if not rivals or team in rivals)
            for other, teams in callers.items()
            if other != group
        ]
        num_turns = len(rivals) or len(others)
        share = math.ceil(sum(callers[group].values()) * num_turns / max(1, sum(others)))
        return min(MOST_STEPS, max(FEWEST_STEPS, worth) * max(1, share))

    def _claims(self, callers: Callers[K]) -> dict[str, K]:
        """Return team -> the group (calls with the same adapters) that gets its next turn: the one waiting longest."""
        claims: dict[str, K] = {}
        for group in self._groups:
            for team in callers[group]:
                claims.setdefault(team, group)
        return claims

    def _rivals(self, group: K, claims: Mapping[str, K]) -> set[str]:
        """Return the teams that wait while `group` (calls with the same adapters) has the turn."""
        return {team for team, claim in claims.items() if claim != group and team != self._holder}

    def _is_over(self, group: K, callers: Callers[K], claims: Mapping[str, K], now: float) -> bool:
        if len(callers) == 1 or not self._num_steps:
            return False
        lasted_s = now - self._since
        rivals = self._rivals(group, claims)
        if rivals:
            is_long = lasted_s + self._last_s > TEAM_WAIT_S / len({claims[team] for team in rivals})
        else:
            is_long = lasted_s >= WAIT_S / (len(callers) - 1)
        return is_long or self._num_steps >= self.length(group, callers, rivals)


def chosen(turns: AdapterTurns[bytes], ready: list[S], now: float) -> list[S]:
    """Return the sequences of `ready` whose adapters have the turn, in the same order."""
    callers: dict[bytes, dict[str, int]] = {}
    for one in ready:
        teams = callers.setdefault(one.adapter_set.key, {})
        teams[one.team] = teams.get(one.team, 0) + 1
    if not callers:
        return ready
    turn = turns.choose(callers, now)
    return ready if len(callers) == 1 else [one for one in ready if one.adapter_set.key == turn]


def _present(queue: Mapping[K, None], here: Iterable[K]) -> dict[K, None]:
    """Return the queue without the members that `here` lacks, and with the new members of `here` at its end."""
    new = dict.fromkeys(here)
    return {**{one: None for one in queue if one in new}, **new}


def _move_back(queue: dict[K, None], one: K) -> None:
    if one in queue:
        del queue[one]
        queue[one] = None


def _mean(mean: float, value: float) -> float:
    return value if not mean else mean + _WEIGHT * (value - mean)


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter: a file's weights under a name. The registry's lock guards all fields that change (all but `name` and
    the digest of `file`)."""

    name: str
    file: AdapterFile
    pinned: bool = False
    fixed: bool = False
    """Whether the adapter comes from the worker's settings, so that it can't be replaced or unloaded."""
    adapter: Adapter | None = None
    """The weights in memory; None: not loaded. Written on the engine's thread only."""
    num_calls: int = 0
    last_use: int = 0
    leaving: bool = False

    def info(self) -> AdapterInfo:
        """Return the adapter's description. It has the full path of the file, which must not be shown to callers."""
        state = AdapterState.KNOWN if self.adapter is None else AdapterState.LOADED
        return AdapterInfo(
            name=self.name,
            sha256=self.file.digest.hex(),
            size=self.file.size,
            rank=self.file.rank,
            state=AdapterState.LEAVING if self.leaving else state,
            pinned=self.pinned,
            fixed=self.fixed,
            calls=self.num_calls,
            path=str(self.file.path),
        )


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of one call with their scales. Two sets are equal if they have the same effect."""

    key: bytes
    """Hashes of the adapters' contents with their scales, sorted; empty: no adapter. Calls are grouped by this key."""
    uses: tuple[tuple[Entry, float], ...] = field(compare=False, repr=False)
    """Adapters with their scales, in the order of the key; no scale is zero."""
    entries: frozenset[Entry] = field(init=False, compare=False, repr=False)
    """The adapters without their scales."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", frozenset(entry for entry, _ in self.uses))


NO_ADAPTERS = AdapterSet(b"", ())
