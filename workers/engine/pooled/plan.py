"""The plan of one micro-batch of pooled work: a pure decision from the progress of the jobs.

Teams take turns: the one that has had the fewest tokens is served first, and of its jobs the one that has, input by
input. A new team or job counts as level with the least served: a short job beside huge ones, however many another team
has, is in the next micro-batch, and nobody starves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(slots=True)
class Account:
    """The tokens that one team's jobs have had, kept while it has jobs."""

    team: str
    served: int = 0
    """Tokens, and where the team came in."""


class Progress(Protocol):
    """A job, as far as the plan must know it."""

    @property
    def account(self) -> Account:
        """Its team's."""

    @property
    def lengths(self) -> Sequence[int]:
        """Return the tokens of each input."""

    @property
    def index(self) -> int:
        """Return the number of the next input."""

    @property
    def offset(self) -> int:
        """Return that input's computed tokens; above 0 it holds a sequence and cells for its whole length."""

    @property
    def served(self) -> int:
        """Return the tokens computed for the job, plus the level at which it began."""


J = TypeVar("J", bound=Progress)


@dataclass(frozen=True, slots=True)
class Part(Generic[J]):
    """Tokens [start, end) of one input."""

    job: J
    index: int
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.job.lengths[self.index]


@dataclass(frozen=True, slots=True)
class Room:
    """The room that is free for one micro-batch."""

    num_tokens: int
    num_sequences: int
    num_cells: float = math.inf
    """Free KV cells; infinite for encoders, which have no KV cache."""
    can_split: bool = False
    """Whether an input may be computed in parts."""


def plan_batch(jobs: Iterable[J], room: Room) -> list[Part[J]]:
    """Return the parts of the next micro-batch, at most one of each input. `jobs` are in order of arrival.

    When the job whose turn it is finds no cells or sequence for its next input, no job behind it begins one: else short
    inputs could keep a long one out for ever.
    """
    parts: list[Part[J]] = []
    num_tokens, num_sequences, num_cells = room.num_tokens, room.num_sequences, room.num_cells
    may_begin = True
    queues: dict[str, list[tuple[int, int, J, int, int]]] = {}
    turns: list[tuple[int, int, str]] = []
    for number, job in enumerate(jobs):
        team = job.account.team
        if team not in queues:
            queues[team] = []
            turns.append((job.account.served, number, team))
        queues[team].append((job.served, number, job, job.index, job.offset))
    heapq.heapify(turns)
    for queue in queues.values():
        heapq.heapify(queue)
    while turns and num_tokens:
        team_served, first, team = heapq.heappop(turns)
        queue = queues[team]
        served, number, job, index, offset = heapq.heappop(queue)
        length = job.lengths[index]
        fits = room.can_split or length <= num_tokens  # else it comes first in one of the next micro-batches
        if fits and not offset:
            fits = may_begin = may_begin and num_sequences > 0 and length <= num_cells
            num_sequences, num_cells = num_sequences - 1, num_cells - length
        if fits:
            end = min(length, offset + num_tokens)
            parts.append(Part(job, index, offset, end))
            num_tokens -= end - offset
            team_served += end - offset
            if end == length and index + 1 < len(job.lengths):
                heapq.heappush(queue, (served + end - offset, number, job, index + 1, 0))
        if queue:
            heapq.heappush(turns, (team_served, first, team))
    return parts
