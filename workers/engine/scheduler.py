"""The plan of one step: a pure decision from the progress of the sequences.

Every decoding sequence gets its token in every step. Prompts share what is left of the step's bound: several short ones
go together and a long one advances in chunks; beside running streams these are so small that nobody waits long for the
next token (`pace`). Calls that come back in the middle of their answers, and compute again what was not kept, take
little of a step while others are served: they do not delay others' first tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Progress(Protocol):
    """A sequence, as far as the scheduler must know it."""

    @property
    def num_prompt_left(self) -> int:
        """Return the prompt tokens that are not in the KV cache yet; 0: the sequence is decoding."""

    @property
    def num_next(self) -> int:
        """Return the most prompt tokens to take in one step; at least 1 where any are left."""

    @property
    def is_back(self) -> bool:
        """Return whether its answer had begun before it lost its cells: it computes its tokens again."""


S = TypeVar("S", bound=Progress)

ROWS_MULTIPLES = (64, 4)
"""Numbers of rows whose multiples a CPU's kernels like: attention works in tiles of 64, matrices in fours.

With a 0.5 B model at a depth of 2,000 tokens, 60 rows took 953 ms, 64 rows 739 and 65 rows 1,097; with little before
them 127 rows 803 ms and 128 rows 731. With the demo model at a depth of 600, 32 rows took 50 ms, 63 rows 138 and 64
rows 14.
"""


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    sequence: S
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan(Generic[S]):
    decode: list[S]
    """Decoding sequences, one token each."""
    prefill: list[Chunk[S]]

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.num_tokens for chunk in self.prefill)


def in_parts(plan: Plan[S], most_rows: int, *, alike: bool) -> Iterator[Plan[S]]:
    """Cut a step into steps of at most `most_rows` rows, in its order; no chunk is longer.

    `alike`: the sequences of a part have as many rows each.
    """
    for start in range(0, len(plan.decode), most_rows):
        yield Plan(plan.decode[start : start + most_rows], [])
    part: list[Chunk[S]] = []
    for chunk in plan.prefill:
        num_rows = sum(one.num_tokens for one in part)
        if part and (num_rows + chunk.num_tokens > most_rows or (alike and part[0].num_tokens != chunk.num_tokens)):
            yield Plan([], part)
            part = []
        part.append(chunk)
    if part:
        yield Plan([], part)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step, tokens."""

    n_batch: int
    """Most tokens of a step; more than there are sequences."""
    n_ubatch: int
    """Tokens that the device computes at once: a step is filled up to this with prompts."""
    min_prefill: int
    """Fewest prompt tokens by which prompts advance in every step, however many sequences decode."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Bounds on the prompt tokens of a step that other calls wait for (`workers.engine.pace`)."""

    prompts: int
    """Most prompt tokens of calls without a token yet, beside decoding ones."""
    again: int
    """Most tokens of calls that are back, beside any others."""
    most: int
    """Most prompt tokens of calls without a token yet, however many wait."""
    streams: int = 0
    """Answers that wait for the step, including those that take no part in it."""


def plan_step(sequences: Iterable[S], limits: Limits, beside: Beside, room: int) -> Plan[S]:
    """Return the next step. `sequences` are in the order in which they are served; each is in the step at most once.

    Calls that wait for their first token raise `beside.prompts` in their proportion to those that decode: one caller's
    wait weighs as much as another's, and a burst is computed in few full steps instead of many small ones, up to
    `beside.most`. `room`: free KV cells; decoding sequences always fit (the engine makes sure), prompts take the rest.
    """
    decode: list[S] = []
    firsts: list[S] = []
    back: list[S] = []
    for sequence in sequences:
        (decode if not sequence.num_prompt_left else back if sequence.is_back else firsts).append(sequence)
    if not (firsts or back):
        return Plan(decode, [])
    budget = limits.n_ubatch
    num_streams = max(len(decode), beside.streams)
    if num_streams:
        weighed = beside.prompts * (max(len(firsts) - 1, 0) + num_streams) // num_streams
        wanted = max(min(limits.n_ubatch - len(decode), weighed, beside.most), limits.min_prefill)
        budget = min(wanted, limits.n_batch - len(decode))
    budget = min(budget, room - len(decode))
    if decode and sum(sequence.num_prompt_left for sequence in (*firsts, *back)) > budget:
        budget = _even(budget, len(decode), limits)
    if not back:
        return Plan(decode, share_out(firsts, budget))
    if not (firsts or num_streams):
        return Plan([], share_out(back, budget))
    num_wanted = sum(sequence.num_prompt_left for sequence in firsts)
    # If first prompts fill the step anyhow, calls that are back get at most half of it.
    num_again = min(max(beside.again, num_wanted), budget // 2) if firsts else beside.again
    chunks = share_out(firsts, budget - num_again) if firsts else []
    num_rows = len(decode) + sum(chunk.num_tokens for chunk in chunks)
    most = min(max(limits.n_ubatch, limits.min_prefill + num_rows), limits.n_batch, room) - num_rows
    return Plan(decode, [*chunks, *share_out(back, min(_whole_tiles(back, num_again, num_rows), most))])


def _whole_tiles(back: list[S], num_again: int, num_rows: int) -> int:
    """Return a number of tokens that fills the last tile of a step, and leaves no rest that is shorter than a tile."""
    tile = ROWS_MULTIPLES[0]
    num_again += -(num_rows + num_again) % tile
    num_left = sum(sequence.num_prompt_left for sequence in back)
    return num_left if num_left < num_again + tile else num_again


def _even(budget: int, num_decode: int, limits: Limits) -> int:
    """Return the budget, cut down a little to a number of rows that the kernels like."""
    for multiple in ROWS_MULTIPLES:
        less = budget - (num_decode + budget) % multiple
        if less >= max(limits.min_prefill, budget // 2):
            return less
    return budget


def share_out(waiting: list[S], budget: int) -> list[Chunk[S]]:
    """Share the budget out: half to the first in order, the other half to the shortest prompts, the rest to the first.

    So a long prompt does not keep short ones behind it waiting, and keeps at least half of its own speed.
    """
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
