"""The placement request of a call (`Ask`), and the ranking of workers that answers it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gateway.routing.slot_numbers import ANY
from workers.protocol.pooled import PoolInput, PoolRequest
from workers.protocol.prefixes import NOTHING, Prefix, prefix_of
from workers.protocol.requests import GenerateRequest

MAX_BIDS = 8
"""Most workers that a ticket has bids for."""
MAX_LEFT_OUT = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """The facts of one call that its placement depends on."""

    prefix: Prefix = NOTHING
    """The prompt's prefix hashes (heads); none where it may not use the cache. `num_bytes` is right in any case."""
    max_tokens: int | None = None
    """Most tokens of its answer; None: no bound is named."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it names."""
    slot: int = ANY
    """Number of the slot that it asks for, counted over the model's workers."""


ANYWHERE = Ask()


def ask_of(request: GenerateRequest, tenant: str, hashes: Mapping[str, str]) -> Ask:
    """Return the placement request of a generation. `hashes`: adapter -> SHA-256, of those that the model has."""
    prefix = prefix_of(request, tenant, hashes)
    return Ask(
        prefix if request.cache_prompt else Prefix((), (), prefix.num_bytes),
        request.max_tokens,
        frozenset(use.name for use in request.adapters),
        request.slot,
    )


def ask_of_pooled(request: PoolRequest) -> Ask:
    """Return the placement request of embeddings or a ranking: nothing is cached, and there is no decode."""
    num_bytes = sum(map(_num_bytes, request.inputs))
    return Ask(Prefix((), (), num_bytes + len(request.query or "") * len(request.inputs)), max_tokens=0)


def _num_bytes(one: PoolInput) -> int:
    if isinstance(one, str):
        return len(one)
    return sum(len(part) if isinstance(part, str) else 4 for part in one)


class Bid(msgspec.Struct, frozen=True):
    """The predicted cost of one worker for a call. A struct, since nine of them are made for each call."""

    worker: str
    wait_ms: float
    """Predicted time until it has a slot there and its prefill begins."""
    cost_ms: float
    """Predicted time from then to its first token: loading adapters, and prefill of what is not cached there."""
    kv_tokens: int
    """KV cells that it is predicted to take: the uncached part of the prompt, and the answer."""
    cached_tokens: int
    """Estimated tokens of the prompt that are cached there."""
    burden_ms: float = 0.0
    """Cost of its prefill for other calls: those behind it, and those whose cached prompts give way to it."""

    @property
    def weight_ms(self) -> float:
        """The cost to all calls, once it has a slot."""
        return self.cost_ms + self.burden_ms

    @property
    def total_ms(self) -> float:
        """The figure by which workers are compared."""
        return self.wait_ms + self.weight_ms


@dataclass(frozen=True, slots=True)
class Ranking:
    """The workers for a call, best first. No slot is taken yet."""

    bids: tuple[Bid, ...]
    """Bids of the best workers, at most MAX_BIDS, by `total_ms`; none where no worker would do."""
    elsewhere: Bid | None = None
    """The least bid of any other worker that would do; None: there is no other, or too many would not do."""
    left_out: frozenset[str] = frozenset()
    """Workers that would not do and that `elsewhere` does not stand for, at most MAX_LEFT_OUT."""
    charge: float = 0.0
    """Tokens that the call is predicted to take, for fair shares: uncached prompt and answer on the best worker; the
    whole prompt and the answer where there is no worker.
    """
    hold_ms: float = 0.0
    """Predicted time of the decode, after the first token."""

    @property
    def take(self) -> tuple[Bid, ...]:
        """The workers to take at once if they have a slot: none is worse than waiting for the best one."""
        if not self.bids:
            return ()
        least = self.bids[0].total_ms
        return tuple(bid for bid in self.bids if bid.weight_ms <= least)
