"""The calls of pooled work (jobs), and the plan of one micro-batch: a pure decision from the progress of the jobs.

Teams take turns: the next input is one of the team for which the fewest tokens were computed so far, and of that team's
job with the fewest. A new team or job begins with the lowest count of the others. So a short job is in the next
micro-batch even beside many huge jobs of another team, and nobody starves. Whose turn comes first also decides whether
a micro-batch has tokens, or cells of pictures and sounds: they count alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workers.engine.cache.prompt import Prompt
from workers.engine.pooled.media import MediaInput, Rows
from workers.llama.context import Tokens
from workers.llama.pooling import Pooling

Vectors = NDArray[np.float32]

NONE, MAX_ABSOLUTE, TAXICAB, EUCLIDEAN = -1, 0, 1, 2

LARGEST = 32760.0
"""Largest absolute value after normalising with `MAX_ABSOLUTE`: the range of 16-bit integers."""


def normalized(vectors: Vectors, norm: int) -> Vectors:
    """Return float32 [rows, width] vectors, each row divided by its norm. A row of zeros stays as it is.

    `norm` above `EUCLIDEAN` is the p of a p-norm. NaN and infinities become NaN; other numbers in their row become 0.
    Source: `common_embd_normalize` in common.cpp of llama.cpp."""
    if norm == NONE:
        return vectors
    with np.errstate(invalid="ignore"):
        return _scaled(vectors, norm)


def _scaled(vectors: Vectors, norm: int) -> Vectors:
    if norm == EUCLIDEAN:
        lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
    else:
        sizes = np.abs(vectors).astype(np.float64)
        largest = sizes.max(axis=1, initial=0.0)
        if norm == MAX_ABSOLUTE:
            lengths = largest / LARGEST
        else:
            # Relative to the largest, so that no power overflows or vanishes.
            relative = np.divide(sizes, largest[:, None], out=np.zeros_like(sizes), where=largest[:, None] > 0)
            lengths = largest * np.power(np.power(relative, norm).sum(axis=1), 1.0 / norm)
    factors = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    scaled: Vectors = (vectors * factors[:, None]).astype(np.float32)
    return scaled


@dataclass(slots=True)
class Account:
    """Counts the tokens of one team's jobs, as long as the team has jobs."""

    team: str
    served: int = 0
    """Tokens computed for the team, plus a start value: the lowest count of other teams when its first job came."""


class MediaProgress(Protocol):
    """The attributes of an input with pictures or sounds that the plan needs."""

    @property
    def is_ready(self) -> bool:
        """Return whether it can be computed now."""

    def run(self, cell: int) -> tuple[int, Rows]:
        """Return the end of the run of like cells that `cell` lies in, and their kind."""


class Progress(Protocol):
    """The attributes of a job that the plan needs."""

    @property
    def account(self) -> Account:
        """Return the account of the job's team."""

    @property
    def lengths(self) -> Sequence[int]:
        """Return the number of tokens of each input, the cells of its pictures and sounds included."""

    @property
    def media(self) -> Mapping[int, MediaProgress]:
        """Return index -> input, for those inputs with pictures or sounds that are not computed yet."""

    @property
    def index(self) -> int:
        """Return the index of the next input to compute."""

    @property
    def offset(self) -> int:
        """Return how many tokens of input `index` are computed. Once any are, it holds a sequence and all its cells."""

    @property
    def served(self) -> int:
        """Return the tokens computed for the job, plus a start value: the lowest count of its team's other jobs."""


J = TypeVar("J", bound=Progress)

Turn = tuple[int, int, J, int, int]
"""Tokens computed for a job, its number, the job, and the input that is next with how many of its tokens are computed.
"""


@dataclass(frozen=True, slots=True)
class Part(Generic[J]):
    """Tokens [start, end) of one input, or cells of a picture or sound in it."""

    job: J
    index: int
    start: int
    end: int
    kind: Rows = Rows.TOKENS

    @property
    def is_last(self) -> bool:
        return self.end == self.job.lengths[self.index]


@dataclass(frozen=True, slots=True)
class Room:
    """The room that is free for one micro-batch: tokens, sequences and KV cells."""

    num_tokens: int
    num_sequences: int
    num_cells: float = math.inf
    """Free KV cells; infinite for encoders, which have no KV cache."""
    can_split: bool = False
    """Whether an input can be computed in parts."""


NO_SEQUENCE = -1

PooledInput = Sequence[int] | Prompt
"""Tokens, or a prompt with pictures or sounds in it."""


def tokens_of(one: PooledInput) -> Sequence[int]:
    """Return the tokens of an input; in cells of pictures and sounds stand meaningless ones."""
    return one.tokens if isinstance(one, Prompt) else one


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """A call of pooled work, with its inputs as tokens."""

    key: int
    """Number of the call in this engine, never used twice."""
    inputs: Sequence[PooledInput]
    normalize: int = 2
    """The norm, as in `workers.engine.pooled.jobs.normalized`; unused for scores and single tokens' vectors."""
    label: str = ""
    """Name of the call in log lines."""
    tenant: str = ""
    """Team of the caller; teams take turns."""
    salt: str = ""
    """The caller's `cache_salt`: embeddings of pictures are found again by calls of its team with the same one."""


class Job:
    """The progress of one call. `submit` makes it on any thread; from then on it belongs to the engine's thread."""

    __slots__ = (
        *("_parts", "account", "index", "inputs", "key", "label", "lengths", "media", "normalize", "offset"),
        *("results", "salt", "sequence", "served"),
    )

    def __init__(self, request: PooledRequest) -> None:
        self.key = request.key
        self.label = request.label
        self.account = Account(request.tenant)
        self.salt = request.salt
        self.inputs: list[Tokens] = [np.asarray(tokens_of(one), dtype=np.int32) for one in request.inputs]
        self.lengths = [len(tokens) for tokens in self.inputs]
        self.media: dict[int, MediaInput] = {
            index: MediaInput(one) for index, one in enumerate(request.inputs) if isinstance(one, Prompt) and one.spans
        }
        """Those inputs with pictures or sounds that are not computed yet, by their indices."""
        self.normalize = request.normalize
        self.index = 0
        self.offset = 0
        self.served = 0
        self.sequence = NO_SEQUENCE
        """Id of the sequence while an input is computed in parts. An input in one part holds one for a single step."""
        self.results: list[Vectors] = []
        self._parts: list[Vectors] = []
        """Results so far for input `index`: without pooling the vectors of each part, else one vector for all parts."""

    @property
    def num_cells(self) -> int:
        """Return the KV cells that are reserved for the input in progress."""
        return self.lengths[self.index] if self.offset else 0

    @property
    def last_position(self) -> int:
        """Return the highest position of the cells that the input in progress holds; -1 if there are none."""
        media = self.media.get(self.index)
        return self.offset - 1 if media is None else media.last_position(self.offset)

    def take(self, part: Part[Job], vectors: Vectors, pooling: Pooling) -> None:
        """Add the `vectors` that were computed for a part of the next input."""
        num_tokens = part.end - part.start
        self.served += num_tokens
        self.account.served += num_tokens
        if pooling is Pooling.NONE:
            self._parts.append(vectors)
        elif pooling is Pooling.MEAN:
            if not (part.start == 0 and part.is_last):
                vectors = vectors * np.float32(num_tokens / self.lengths[part.index])
            self._parts = [self._parts[0] + vectors] if self._parts else [vectors]
        elif pooling is not Pooling.CLS or part.start == 0:
            self._parts = [vectors]
        self.offset = part.end
        if part.is_last:
            whole = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
            plain = pooling in (Pooling.NONE, Pooling.RANK)
            self.results.append(whole if plain else normalized(whole, self.normalize))
            self.media.pop(part.index, None)  # with pixels and embeddings, some megabytes
            self._parts, self.offset, self.index = [], 0, self.index + 1

    def position(self, part: Part[Job]) -> int:
        """Return the position of a part's first token."""
        media = self.media.get(part.index)
        return part.start if media is None else media.prompt.position(part.start)


def plan_batch(jobs: Iterable[J], room: Room) -> list[Part[J]]:
    """Return the parts of the next micro-batch, at most one of each input and all of one kind. `jobs` are in order of
    arrival.

    If it is a job's turn, but no sequence or too few cells are free for its next input, no later job may begin an
    input in this micro-batch: otherwise, short inputs could keep a long one out for ever."""
    parts: list[Part[J]] = []
    kind: Rows | None = None
    num_tokens, num_sequences, num_cells = room.num_tokens, room.num_sequences, room.num_cells
    may_begin = True
    queues, turns = _queues_of(jobs)
    while turns and num_tokens:
        team_served, first, team = heapq.heappop(turns)
        queue = queues[team]
        served, number, job, index, offset = heapq.heappop(queue)
        length = end = job.lengths[index]
        wanted, can_split = Rows.TOKENS, room.can_split
        fits = True
        if job.media and (media := job.media.get(index)) is not None:
            end, wanted = media.run(offset)
            can_split = wanted is not Rows.WHOLE
            fits = media.is_ready
        fits = fits and kind in (None, wanted)
        # What does not fit comes first in one of the next micro-batches.
        fits = fits and (can_split or end - offset <= num_tokens)
        if fits and not offset:
            fits = may_begin = may_begin and num_sequences > 0 and length <= num_cells
            num_sequences, num_cells = num_sequences - 1, num_cells - length
        if fits:
            kind, end = wanted, min(end, offset + num_tokens)
            parts.append(Part(job, index, offset, end, wanted))
            num_tokens -= end - offset
            team_served += end - offset
            if end == length and index + 1 < len(job.lengths):
                heapq.heappush(queue, (served + end - offset, number, job, index + 1, 0))
        if queue:
            heapq.heappush(turns, (team_served, first, team))
    return parts


def _queues_of(jobs: Iterable[J]) -> tuple[dict[str, list[Turn[J]]], list[tuple[int, int, str]]]:
    """Return each team's jobs, and the teams, as heaps: those whose turn it is come first."""
    queues: dict[str, list[Turn[J]]] = {}
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
    return queues, turns
