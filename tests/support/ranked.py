"""Pools for ranking, built by hand: workers in milliseconds and tokens, prompts of as many bytes as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from gateway.routing.placement import ANY, PlacementRequest
from gateway.routing.pool import PoolUpdater
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import Heartbeat, Load
from workers.protocol.prefixes import Prefix

NOW = 1000.0
MEASURED = Load(
    prefill_ms=1.0, decode_ms=10.0, hold_ms=4000.0, answer_tokens=100.0, bytes_per_token=1.0, free_in_ms=0.0
)
"""A prompt token takes a millisecond and is a byte; an answer has a hundred tokens and takes a second."""


def worker(name: str, *, load: Load = MEASURED, **facts: object) -> Heartbeat:
    """A worker with four slots and room for anything."""
    given = {"slots": 4, "n_ctx": 1_000_000, "kv_tokens": 10_000_000, "adapter_room": 8} | facts
    return msgspec.structs.replace(heartbeat(name), load=load, **given)


def busy(**changes: float) -> Load:
    """MEASURED, but for these."""
    return msgspec.structs.replace(MEASURED, **changes)


def full(free_in_ms: float, **changes: float) -> Load:
    """All four slots taken, one of them for so long still."""
    return busy(slots_busy=4, free_in_ms=free_in_ms, **changes)


def prompt(num_bytes: int, heads: Mapping[int, int] | None = None, **wishes: object) -> PlacementRequest:
    """`heads`: digest -> its end; by default none."""
    ends = heads or {}
    ask = {"max_tokens": None, "adapters": frozenset[str](), "slot": ANY} | wishes
    return PlacementRequest(Prefix(tuple(ends), tuple(ends.values()), num_bytes), **ask)  # type: ignore[arg-type]


def book_of(workers: Iterable[Heartbeat], heads: Mapping[str, Iterable[int]] | None = None) -> PoolUpdater:
    """All heard of now."""
    book = PoolUpdater()
    for there in workers:
        book.join(there, (heads or {}).get(there.worker, ()), now=NOW)
    return book


@dataclass(slots=True)
class Sent:
    """What a gateway has done since the workers' news."""

    moves: dict[str, tuple[int, float]] = field(default_factory=dict)

    def since(self, worker: str, at: float) -> tuple[int, float]:
        return self.moves.get(worker, (0, 0.0))
