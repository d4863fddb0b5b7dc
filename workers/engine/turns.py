"""Whose adapters the next step computes with: a pure decision, since all rows of one `llama_decode` share them.

Groups take turns. A switch makes llama.cpp lay out its graphs anew, so a turn lasts several steps where that is dear
against a step, and one caller with an adapter of their own does not halve the pace of fifteen others: a group's turn
grows with its share of the callers. Both have a bound, in steps and in time.

One run each on one core, one caller, rank 8 or 16 on seven matrices of each layer: a switch adds 0.8 to 1.0 ms with the
demo model (steps of 0.25 ms), 4.2 to 4.4 ms with a 0.5 B model (steps of 23 ms). With eight callers it is in the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

SHARE = 0.1
"""Of the time of a turn that its switch may take."""

FEWEST_STEPS = 2
"""Of a turn: the first step pays for the switch, the second tells how much that was."""

MOST_STEPS = 16
"""Of a turn that others wait for; with k groups nobody waits for more than (k - 1) times as many."""

WAIT_S = 0.25
"""A turn ends early, after one step at least, once the turns of all would take longer than this."""

_WEIGHT = 0.3
"""Of the newest measurement, against all before it."""

K = TypeVar("K")


class AdapterUser(Protocol):
    @property
    def adapter_set(self) -> Keyed: ...


class Keyed(Protocol):
    @property
    def key(self) -> bytes: ...


S = TypeVar("S", bound=AdapterUser)


class Turns(Generic[K]):
    """Who has the turn, of the groups that have something to compute. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.switch_s = 0.0
        """What a switch costs, as far as it is known."""
        self.step_s = 0.0
        """What a step without one takes."""
        self._current: K | None = None
        self._queue: dict[K, None] = {}
        """Who waits, the longest first."""
        self._num_steps = 0
        self._since = 0.0
        self._first_s = 0.0
        """What the turn's first step took, if that paid for a switch; else 0."""

    def choose(self, sizes: Mapping[K, int], now: float) -> K:
        """Callers per group, at least one group -> the group of the next step. Asking again changes nothing."""
        for group in [group for group in self._queue if group not in sizes]:
            del self._queue[group]
        for group in sizes:
            if group != self._current:
                self._queue.setdefault(group)
        current = self._current
        if current is None or current not in sizes or self._is_over(current, sizes, now):
            if current is not None and current in sizes:
                self._queue[current] = None
            current = self._current = next(iter(self._queue))
            del self._queue[current]
            self._num_steps, self._since, self._first_s = 0, now, 0.0
        return current

    def note_step(self, seconds: float, *, switched: bool, comparable: bool = True) -> None:
        """The chosen group's step took this long. `comparable`: it computed one token per caller, no prompt."""
        self._num_steps += 1
        if not comparable:
            self._first_s = 0.0
        elif switched:
            self._first_s = seconds if self._num_steps == 1 else 0.0
        else:
            self.step_s = _mean(self.step_s, seconds)
            if self._first_s:
                self.switch_s = _mean(self.switch_s, max(0.0, self._first_s - seconds))
                self._first_s = 0.0

    def length(self, group: K, sizes: Mapping[K, int]) -> int:
        """Steps of a turn of `group` while others wait."""
        worth = math.ceil(self.switch_s / (SHARE * self.step_s)) if self.step_s else 0
        others = sum(sizes.values()) - sizes[group]
        share = math.ceil(sizes[group] * (len(sizes) - 1) / max(1, others))
        return min(MOST_STEPS, max(FEWEST_STEPS, worth) * max(1, share))

    def _is_over(self, group: K, sizes: Mapping[K, int], now: float) -> bool:
        if not self._queue or not self._num_steps:
            return False
        is_long = now - self._since >= WAIT_S / len(self._queue)
        return is_long or self._num_steps >= self.length(group, sizes)


def chosen(turns: Turns[bytes], ready: list[S], now: float) -> list[S]:
    """Those of `ready` whose adapters have the turn, in the same order."""
    sizes: dict[bytes, int] = {}
    for one in ready:
        key = one.adapter_set.key
        sizes[key] = sizes.get(key, 0) + 1
    if not sizes:
        return ready
    turn = turns.choose(sizes, now)
    return ready if len(sizes) == 1 else [one for one in ready if one.adapter_set.key == turn]


def _mean(mean: float, value: float) -> float:
    return value if not mean else mean + _WEIGHT * (value - mean)
