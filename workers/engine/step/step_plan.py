"""Plans one step and the layout of its rows: pure decisions from the progress of the sequences.

Every decoding sequence gets its token in every step; a step without prompts may bring it more, by a draft
(`workers.engine.step.speculator`). Prompts share the rest of the step:
several short prompts are computed together, a long one in chunks. While answers run (streams), chunks are so small that
no stream waits long for its next token (`workers.engine.pace`). A call that was preempted within its answer and is back
recomputes the tokens that were not kept. It gets little of each step while other calls run, so that their first tokens
are not delayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar


class Progress(Protocol):
    """The attributes of a sequence that planning needs."""

    @property
    def num_prompt_left(self) -> int:
        """Return how many tokens must be computed before the next token can be drawn; 0: the sequence is decoding."""

    @property
    def num_next(self) -> int:
        """Return how many of the `num_prompt_left` tokens the next step may compute; at least 1 if there are any."""

    @property
    def is_back(self) -> bool:
        """Return whether the call was preempted within its answer and must recompute tokens before it can go on."""


class Rows(Protocol):
    """A part of a step that takes `num_tokens` rows of the batch."""

    @property
    def num_tokens(self) -> int: ...


S = TypeVar("S", bound=Progress)
P = TypeVar("P", bound=Rows)

ROWS_MULTIPLES = (64, 4)
"""A CPU's kernels are fastest with multiples of these numbers of rows: attention works in tiles of 64 rows, matrix
products in fours. Fewer rows than a tile are slow after many tokens: with a 2-layer model after 2,048 tokens, 35 rows
took 231 ms, 64 rows 93 and 67 rows 115; after none, 56, 68 and 71.

With a 0.5 B model after 2,000 tokens, 60 rows took 953 ms, 64 rows 739 and 65 rows 1,097; after few tokens 127 rows
took 803 ms and 128 rows 731. With the demo model after 600 tokens, 32 rows took 50 ms, 63 rows 138 and 64 rows 14."""


@dataclass(slots=True)
class Decode(Generic[S]):
    """A decoding sequence: one row for its newest token, and one for each token of its draft."""

    sequence: S
    draft: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return 1 + len(self.draft)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    sequence: S
    num_tokens: int


@dataclass(slots=True, weakref_slot=True)
class Plan(Generic[S]):
    """The rows that one step computes. Several steps can have the same plan."""

    decode: list[Decode[S]]
    prefill: list[Chunk[S]]
    media: Chunk[S] | None = None
    """Cells of a picture or sound, which have a `llama_decode` of their own; None: there are none."""
    decoding: list[S] = field(init=False)
    """The sequences of the parts in `decode`, in the same order."""
    num_tokens: int = field(init=False)
    """Number of rows of the batch: a row is a token. Cells of `media` do not count."""
    has_drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.decoding = [one.sequence for one in self.decode]
        num_decode = num_rows(self.decode)
        self.num_tokens = num_decode + num_rows(self.prefill)
        self.has_drafts = num_decode > len(self.decode)


def num_rows(parts: Iterable[Decode[S] | Chunk[S]]) -> int:
    """Return the number of rows that `parts` take in a batch."""
    return sum(one.num_tokens for one in parts)


def in_parts(plan: Plan[S], most_rows: int, *, alike: bool) -> Iterator[Plan[S]]:
    """Cut a plan into plans of at most `most_rows` rows, in the same order. No single chunk or `Decode` may have more.

    `alike`: all sequences within one of these plans must have the same number of rows."""
    yield from (Plan(part, []) for part in _groups(plan.decode, most_rows, alike=alike))
    yield from (Plan([], part) for part in _groups(plan.prefill, most_rows, alike=alike))


def _groups(parts: list[P], most_rows: int, *, alike: bool) -> Iterator[list[P]]:
    group: list[P] = []
    for one in parts:
        is_other = alike and group and group[0].num_tokens != one.num_tokens
        if group and (is_other or sum(other.num_tokens for other in group) + one.num_tokens > most_rows):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step, in tokens."""

    n_batch: int
    """Maximum number of tokens of a step. It must be larger than the number of sequences."""
    n_ubatch: int
    """Number of tokens that the device computes at once: a step is filled up to this with prompts."""
    min_prefill: int
    """Minimum number of prompt tokens in every step while prompts wait, however many sequences decode."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Bounds on a step's prompt tokens while streams wait for the step to end (`workers.engine.pace`)."""

    prompts: int
    """Maximum prompt tokens of a step if one call waits for its first token; with more calls `plan_step` raises it."""
    again: int
    """Tokens that a step recomputes for calls preempted within their answer while others run; `plan_step` adapts it."""
    most: int
    """Maximum prompt tokens of a step for calls that wait for their first token, however many such calls there are."""
    streams: int = 0
    """Number of streams that wait for the step, including those that take no part in it."""


def plan_step(sequences: Iterable[S], limits: Limits, beside: Beside, room: int) -> Plan[S]:
    """Return the next step's plan. `sequences` are in the order in which they are served. `room`: free KV cells;
    decoding sequences always fit (the engine makes sure of that), prompts get the rest.

    If f calls wait for their first token while s streams wait for the step, `beside.prompts` is multiplied by
    (s + f - 1) / s, up to `beside.most`. So every caller's wait counts the same, and a burst of calls takes few steps.
    """
    decode: list[Decode[S]] = []
    firsts: list[S] = []
    back: list[S] = []
    for sequence in sequences:
        if not sequence.num_prompt_left:
            decode.append(Decode(sequence))
        else:
            (back if sequence.is_back else firsts).append(sequence)
    if not (firsts or back):
        return Plan(decode, [])
    budget = limits.n_ubatch
    num_streams, num_decode = max(len(decode), beside.streams), num_rows(decode)
    if num_streams:
        weighed = beside.prompts * (max(len(firsts) - 1, 0) + num_streams) // num_streams
        wanted = max(min(limits.n_ubatch - num_decode, weighed, beside.most), limits.min_prefill)
        budget = min(wanted, limits.n_batch - num_decode)
    budget = min(budget, room - num_decode)
    num_left = sum(sequence.num_prompt_left for sequence in (*firsts, *back))
    if num_left > budget:
        budget = _even(budget, num_decode, limits) if decode else budget
        most = min(limits.n_ubatch - num_decode, room - num_decode, beside.most if num_streams else limits.n_ubatch)
        budget = _without_rest(budget, num_left, num_decode, most)
    if not back:
        return Plan(decode, share_out(firsts, budget))
    if not (firsts or num_streams):
        return Plan([], share_out(back, budget))
    num_wanted = sum(sequence.num_prompt_left for sequence in firsts)
    # If first prompts fill the step anyway, calls that are back get up to half of it.
    num_again = min(max(beside.again, num_wanted), budget // 2) if firsts else beside.again
    chunks = share_out(firsts, budget - num_again) if firsts else []
    num_before = num_decode + num_rows(chunks)
    most = min(max(limits.n_ubatch, limits.min_prefill + num_before), limits.n_batch, room) - num_before
    return Plan(decode, [*chunks, *share_out(back, min(_whole_tiles(back, num_again, num_before), most))])


def _whole_tiles(back: list[S], num_again: int, num_before: int) -> int:
    """Return how many tokens to recompute for the calls in `back`: `num_again`, or more, so that the step's rows (with
    `num_before` others) fill whole tiles of 64. If fewer than 64 tokens would be left, return all of theirs."""
    tile = ROWS_MULTIPLES[0]
    num_again += -(num_before + num_again) % tile
    num_left = sum(sequence.num_prompt_left for sequence in back)
    return num_left if num_left < num_again + tile else num_again


def _even(budget: int, num_decode: int, limits: Limits) -> int:
    """Return the budget, or somewhat less, so that the step has a multiple of 64 or of 4 rows (`ROWS_MULTIPLES`)."""
    for multiple in ROWS_MULTIPLES:
        less = budget - (num_decode + budget) % multiple
        if less >= max(limits.min_prefill, budget // 2):
            return less
    return budget


def _without_rest(budget: int, num_left: int, num_decode: int, most: int) -> int:
    """Return the budget, changed if the step after it would be left with less than a tile of rows, which attention
    computes one by one: such a rest gets a tile of this step's, or joins a step of a single tile (up to `most`)."""
    tile = ROWS_MULTIPLES[0]
    if num_left - budget + num_decode >= tile:
        return budget
    if budget - tile + num_decode >= tile:
        return budget - tile
    return num_left if num_left <= most else budget


def share_out(waiting: list[S], budget: int) -> list[Chunk[S]]:
    """Return chunks within a token budget: half for the first in order, half for the shortest others. The first also
    gets what these leave. So a long prompt does not delay short ones after it, and keeps at least half of its speed."""
    first, *others = waiting
    reserved = min(first.num_next, (budget + 1) // 2 if others else budget)
    left = budget - reserved
    chunks: list[Chunk[S]] = []
    for sequence in sorted(others, key=_length):
        num_tokens = min(sequence.num_next, left)
        if num_tokens <= 0:
            break
        chunks.append(Chunk(sequence, num_tokens))
        left -= num_tokens
    num_first = min(first.num_next, reserved + left)
    return [Chunk(first, num_first), *chunks] if num_first > 0 else chunks


def _length(sequence: Progress) -> int:
    return sequence.num_prompt_left


MULTIPLE = 4

TILE_CELLS, EMPTY_ROW_CELLS, LEAST_DEPTH = 4, 750, 256
"""What a step costs attention on a CPU, in cells that one row alone attends to: each cell of a sequence costs a tile of
64 rows as much as `TILE_CELLS`; an empty row costs the rest of the model `EMPTY_ROW_CELLS` at most.

With the 2-layer toy it costs 230, with models of 7 B parameters about 750. `LEAST_DEPTH`: fewest tokens before a chunk
with which tiles are filled at all, so that fresh short prompts are computed as in llama-server."""

MOST_SINGLE = 6
"""Maximum number of rows for which computing them one by one (`Layout.SINGLY`) is tried: each row reads all weights."""

MOST_PADDED = 32
"""Maximum number of rows of a step without prompts that may be padded with empty rows."""

MOST_PADDED_PROMPT = 256
"""Maximum rows of a step with prompts that is padded: for larger ones the gain is not worth up to 3 KV cells."""

TRIES = 2
"""Number of times that each layout is tried before the layouts are compared."""

TRY_AGAIN_STEPS = 256
"""After so many steps of the same number of rows, a layout (each in turn) is tried anew: times grow with contexts."""

_WEIGHT = 0.3
"""Weight of the newest measurement in a running mean; the measurements before it share the rest."""


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
    """Chooses the layout of the rows of a step without prompts: together, padded with empty rows, or singly. Learns the
    quickest layout by trying. `fixed`: always together (a GPU handles all numbers of rows alike).

    On a CPU the time of a batch does not grow evenly with its rows. One row is computed by a dot product, more rows by
    matrix kernels that are fastest with multiples of 4 and slow for few rows. Measured with a 0.5 B model, Q8_0, one
    core, in ms: 1 row 19.5, 2 rows 80, 4 rows 116, 7 rows 181, 8 rows 139. So two calls are quicker one by one (42 ms),
    seven calls with an eighth, empty row (134 ms). Other types and machines differ, so no such time is assumed."""

    def __init__(self, *, fixed: bool, can_pad: bool = True) -> None:
        self._fixed = fixed
        self._can_pad = can_pad
        self._known: dict[int, _Known] = {}
        self._ways: dict[int, list[Layout]] = {}
        """Number of rows -> `ways_of` it."""

    def choose(self, num_rows: int) -> Layout:
        """Return the layout for a step of `num_rows` rows without prompts."""
        if self._fixed:
            return Layout.TOGETHER
        ways = self._ways.get(num_rows)
        if ways is None:
            ways = self._ways[num_rows] = ways_of(num_rows, can_pad=self._can_pad)
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
        """Return how many empty rows make a step with prompts quicker: 15 rows took 152 ms, and 16 rows only 123 ms."""
        return padding(num_rows) if self._can_pad and not self._fixed and 1 < num_rows <= MOST_PADDED_PROMPT else 0

    def note(self, num_rows: int, layout: Layout, seconds: float) -> None:
        """Record that a step of `num_rows` rows in this layout took `seconds`."""
        known = self._known.get(num_rows)
        if known is None:
            return
        known.tries[layout] = known.tries.get(layout, 0) + 1
        before = known.seconds.get(layout)
        # Only the best layout, which is used all the time, has a running mean. Of others the last try alone counts.
        is_best = before is not None and before == min(known.seconds.values())
        settled = is_best and known.tries[layout] > TRIES
        known.seconds[layout] = before + _WEIGHT * (seconds - before) if settled and before is not None else seconds


def tile_padding(parts: list[tuple[int, int]]) -> int:
    """Return how many empty rows, up to a tile, make attention quicker; 0: none. `parts`: for each sequence of a step
    with prompts, its rows and the tokens before them.

    A rule and no measurement, so that the same step is computed in the same way each time. After 2,048 tokens 35 rows
    of the 2-layer toy took 232 ms, 63 took 401 and 64 took 92."""
    tile = ROWS_MULTIPLES[0]
    num_rows = sum(rows for rows, _ in parts)
    if num_rows >= tile or max(depth for _, depth in parts) < LEAST_DEPTH:
        return 0
    singly = sum(rows * depth for rows, depth in parts)
    together = TILE_CELLS * sum(depth for _, depth in parts) + EMPTY_ROW_CELLS * (tile - num_rows)
    return tile - num_rows if together < singly else 0


def ways_of(num_rows: int, *, can_pad: bool = True) -> list[Layout]:
    """Return the layouts that are worth trying for `num_rows` rows."""
    ways = [Layout.TOGETHER]
    if can_pad and 1 < num_rows <= MOST_PADDED and num_rows % MULTIPLE:
        ways.append(Layout.PADDED)
    if 1 < num_rows <= MOST_SINGLE:
        ways.append(Layout.SINGLY)
    return ways


def padding(num_rows: int) -> int:
    """Return how many empty rows round `num_rows` up to a multiple of `MULTIPLE`."""
    return -num_rows % MULTIPLE
