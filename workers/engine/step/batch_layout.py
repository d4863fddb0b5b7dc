"""The layout of the rows of a step without prompts: together, padded, or one by one. The best one is learned by trying.

On a CPU the time of a batch does not grow evenly with its rows. One row goes through a dot product, more through matrix
kernels that like multiples of 4 and are slow for few rows. Measured with a 0.5 B model, Q8_0, one core, in ms: 1 row
19.5, 2 rows 80, 4 rows 116, 7 rows 181, 8 rows 139. So two calls are quicker one by one (42 ms), seven with an eighth,
empty row (134 ms). Other types and machines differ, so none of this is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

MULTIPLE = 4

MOST_SINGLE = 6
"""Most rows that are tried one by one: each reads all weights again."""

MOST_PADDED = 32

MOST_PADDED_PROMPT = 256
"""Most rows of a step with prompts that is padded: in longer steps three rows are not worth their cells."""

TRIES = 2
"""Tries of each layout before they are compared."""

TRY_AGAIN_STEPS = 256
"""Steps of one number of rows after which a slower layout is tried again: contexts grow, and so do all times."""

_WEIGHT = 0.3
"""Weight of the newest measurement, against all before it."""


class Layout(Enum):
    TOGETHER = "together"
    PADDED = "padded"
    SINGLY = "singly"


@dataclass(slots=True)
class _Known:
    """The measurements for one number of rows."""

    seconds: dict[Layout, float] = field(default_factory=dict)
    tries: dict[Layout, int] = field(default_factory=dict)
    num_steps: int = 0


class BatchLayouts:
    """Chooses layouts and learns from their times. `fixed`: rows always go together (a GPU takes any number alike)."""

    def __init__(self, *, fixed: bool, can_pad: bool = True) -> None:
        self._fixed = fixed
        self._can_pad = can_pad
        self._known: dict[int, _Known] = {}

    def choose(self, num_rows: int) -> Layout:
        """Return the layout for a step of so many rows, one token each."""
        ways = [] if self._fixed else ways_of(num_rows, can_pad=self._can_pad)
        if len(ways) < 2:
            return Layout.TOGETHER
        known = self._known.setdefault(num_rows, _Known())
        known.num_steps += 1
        for way in ways:
            if known.tries.get(way, 0) < TRIES:
                return way
        if known.num_steps % TRY_AGAIN_STEPS == 0:
            return ways[known.num_steps // TRY_AGAIN_STEPS % len(ways)]
        return min(ways, key=known.seconds.__getitem__)

    def num_empty(self, num_rows: int) -> int:
        """Return the empty rows that speed up a step with prompts: 15 rows took 152 ms, 16 rows 123."""
        return padding(num_rows) if self._can_pad and not self._fixed and 1 < num_rows <= MOST_PADDED_PROMPT else 0

    def note(self, num_rows: int, layout: Layout, seconds: float) -> None:
        """Learn from a step of so many rows in this layout that took `seconds`."""
        known = self._known.get(num_rows)
        if known is None:
            return
        known.tries[layout] = known.tries.get(layout, 0) + 1
        before = known.seconds.get(layout)
        # The layout that is always chosen is known well; of the others only the last try counts, as all times change.
        is_best = before is not None and before == min(known.seconds.values())
        settled = is_best and known.tries[layout] > TRIES
        known.seconds[layout] = before + _WEIGHT * (seconds - before) if settled and before is not None else seconds


def ways_of(num_rows: int, *, can_pad: bool = True) -> list[Layout]:
    """Return the layouts that are worth trying."""
    ways = [Layout.TOGETHER]
    if can_pad and 1 < num_rows <= MOST_PADDED and num_rows % MULTIPLE:
        ways.append(Layout.PADDED)
    if 1 < num_rows <= MOST_SINGLE:
        ways.append(Layout.SINGLY)
    return ways


def padding(num_rows: int) -> int:
    """Return the empty rows that round `num_rows` up to a multiple of `MULTIPLE`."""
    return -num_rows % MULTIPLE
