"""Traces that are made up: a prompt that all share, conversations, and teams that ask for more than there is."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.routing_sim.traces import BLOCK_TOKENS, Arrival, Trace

SHARED_BLOCKS = 16
_OWN = 1 << 32
"""Ids of blocks that one call alone has begin here."""


def one_prefix(trace: Trace) -> Trace:
    """The trace with the same 8,192 tokens before each of its prompts."""
    common = tuple(range(-SHARED_BLOCKS, 0))
    more = SHARED_BLOCKS * BLOCK_TOKENS
    calls = (replace(call, tokens=call.tokens + more, blocks=common + call.blocks) for call in trace.calls)
    return Trace(f"{trace.name}, one prefix", tuple(calls))


def conversations(talks: int, turns: int, seed: int = 1) -> Trace:
    """Each grows by some blocks with every turn, some ten seconds apart: small enough for tests."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    for talk in range(talks):
        at_s, length = chance.uniform(0.0, 30.0), chance.randint(2, 20)
        for _ in range(turns):
            tokens = length * BLOCK_TOKENS - chance.randrange(BLOCK_TOKENS)
            # The last block is not whole: the next turn has another one in its place.
            blocks = (*range(talk * 1_000, talk * 1_000 + length - 1), _OWN + len(arrivals))
            arrivals.append(Arrival(at_s, tokens, chance.randint(1, 200), blocks))
            at_s, length = at_s + chance.expovariate(1 / 10.0), length + chance.randint(1, 3)
    return Trace("conversations", tuple(sorted(arrivals, key=lambda call: call.at_s)))


def team(name: str, calls_per_s: float, end_s: float, slo_s: float = 0.0, seed: int = 1) -> Iterator[Arrival]:
    """Prompts of 1,000 to 9,000 tokens that share nothing, answers of 150 on average."""
    chance = random.Random(f"{name} {seed}")
    at_s = chance.expovariate(calls_per_s)
    while at_s < end_s:
        answer = 1 + int(chance.expovariate(1 / 150))
        yield Arrival(at_s, chance.randint(1_000, 9_000), answer, team=name, slo_s=slo_s)
        at_s += chance.expovariate(calls_per_s)


def together(*teams: Iterator[Arrival]) -> Trace:
    return Trace("teams", tuple(heapq.merge(*teams, key=lambda call: call.at_s)))
