"""What placing a call needs to know of it, and what its placing came to. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gateway.routing.slot_numbers import ANY
from workers.protocol.pooled import PoolInput, PoolRequest
from workers.protocol.prefixes import NOTHING, Prefix, prefix_of
from workers.protocol.requests import GenerateRequest

MAX_BIDS = 8
"""Workers that a ticket has bids for."""
MAX_LEFT_OUT = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """One call, as far as its place goes."""

    prefix: Prefix = NOTHING
    """Its heads; none where it may not use cached prompts. `num_bytes` is right in any case."""
    max_tokens: int | None = None
    """Most tokens of its answer."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it names."""
    slot: int = ANY
    """The slot that it would like, numbered over the model's workers."""


ANYWHERE = Ask()


def ask_of(request: GenerateRequest, tenant: str, hashes: Mapping[str, str]) -> Ask:
    """`hashes`: adapter -> SHA-256, of those that the model has."""
    prefix = prefix_of(request, tenant, hashes)
    return Ask(
        prefix if request.cache_prompt else Prefix((), (), prefix.num_bytes),
        request.max_tokens,
        frozenset(use.name for use in request.adapters),
        request.slot,
    )


def ask_of_pooled(request: PoolRequest) -> Ask:
    """Nothing of it is cached, and its answer is there with its last token."""
    num_bytes = sum(map(_num_bytes, request.inputs))
    return Ask(Prefix((), (), num_bytes + len(request.query or "") * len(request.inputs)), max_tokens=0)


def _num_bytes(one: PoolInput) -> int:
    if isinstance(one, str):
        return len(one)
    return sum(len(part) if isinstance(part, str) else 4 for part in one)


class Bid(msgspec.Struct, frozen=True):
    """What one worker would cost a call. A struct, since nine of them are made for each call."""

    worker: str
    wait_ms: float
    """Predicted time until it has a slot there and its prompt's turn comes."""
    cost_ms: float
    """From then on to its first token: loading adapters, and prefill of what is not cached there."""
    kv_tokens: int
    """KV cells to reckon with: the prompt as far as it is not cached, and the predicted answer."""
    cached_tokens: int
    """Estimated tokens of the prompt that are cached there."""
    burden_ms: float = 0.0
    """What its prefill costs others: those behind it, and those whose cached prompts give way to it."""

    @property
    def weight_ms(self) -> float:
        """What it costs everybody, once it has a slot."""
        return self.cost_ms + self.burden_ms

    @property
    def total_ms(self) -> float:
        """By which workers are compared."""
        return self.wait_ms + self.weight_ms


@dataclass(frozen=True, slots=True)
class Ranking:
    """Where a call should go, best first. Pure: nothing is taken yet."""

    bids: tuple[Bid, ...]
    """At most MAX_BIDS, by `total_ms`; none where no worker would do."""
    elsewhere: Bid | None = None
    """What any other worker that would do costs, at the least; None: there is no other, or too many would not do."""
    left_out: frozenset[str] = frozenset()
    """With `elsewhere`: workers that would not do, at most MAX_LEFT_OUT."""
    charge: float = 0.0
    """Tokens that the call is predicted to take, for fair shares: uncached prompt and answer, on the best worker; where
    there is none, all of the prompt.
    """
    hold_ms: float = 0.0
    """How long its answer is predicted to take after the first token."""

    @property
    def take(self) -> tuple[Bid, ...]:
        """Those to take at once if they have a slot: none is worse than waiting for the best one."""
        if not self.bids:
            return ()
        least = self.bids[0].total_ms
        return tuple(bid for bid in self.bids if bid.weight_ms <= least)
