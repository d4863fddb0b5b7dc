"""What one step computes: a pure decision from where the sequences are.

Every decoding sequence gets its token in every step. Prompts share what is left of the step's bound, oldest first, so
several short ones go together and a long one advances in chunks; beside running streams these are so small that nobody
waits long for the next token (`pace`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Progress(Protocol):
    """What the scheduler must know of a sequence."""

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that are not in the KV cache yet; 0: the sequence is decoding."""


S = TypeVar("S", bound=Progress)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    sequence: S
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan(Generic[S]):
    decode: list[S]
    """One token each."""
    prefill: list[Chunk[S]]

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.num_tokens for chunk in self.prefill)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step, tokens."""

    n_batch: int
    """Most in all; more than there are sequences."""
    n_ubatch: int
    """What the device computes at once: a step is filled up to this with prompts."""
    min_prefill: int
    """Prompts advance by at least this in every step, however many sequences decode."""


def plan_step(sequences: Iterable[S], limits: Limits, prefill_beside: int) -> Plan[S]:
    """`sequences` in order of arrival -> the next step. A sequence is in it at most once.

    `prefill_beside`: most prompt tokens in a step that has decoding sequences. Where more calls wait for their first
    token than decode, it is raised in that proportion: one caller's wait weighs as much as another's, and a burst is
    read in few full steps instead of many small ones.
    """
    decode: list[S] = []
    waiting: list[S] = []
    for sequence in sequences:
        (waiting if sequence.num_prompt_left else decode).append(sequence)
    prefill: list[Chunk[S]] = []
    if waiting:
        budget = limits.n_ubatch
        if decode:
            weighed = prefill_beside * max(len(waiting), len(decode)) // len(decode)
            wanted = max(min(limits.n_ubatch - len(decode), weighed), limits.min_prefill)
            budget = min(wanted, limits.n_batch - len(decode))
        for sequence in waiting:
            if budget <= 0:
                break
            num_tokens = min(sequence.num_prompt_left, budget)
            prefill.append(Chunk(sequence, num_tokens))
            budget -= num_tokens
    return Plan(decode, prefill)
