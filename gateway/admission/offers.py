"""Turns a call's ranking into the offers of its ticket. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.ask import Bid, Ranking
from gateway.store.client import Offer, Offers

NOBODY_ELSE_MS = 60_000.0
"""Cost of not getting a worker where no other would do."""

ANY = Offer("", 0.0, NOBODY_ELSE_MS, 0)
"""The offer of a call that no worker can be ranked for now: it takes the first that comes."""


def offers_of(ranking: Ranking, begin_within_ms: float = 0.0) -> Offers:
    """Return the offers of a ticket for a ranking. `begin_within_ms` as in `Offers`."""
    if not ranking.bids:
        return Offers(elsewhere=ANY, begin_within_ms=begin_within_ms, hold_ms=ranking.hold_ms)
    everywhere = [*ranking.bids] if ranking.elsewhere is None else [*ranking.bids, ranking.elsewhere]
    best = sorted(everywhere, key=lambda bid: bid.total_ms)[:2]
    take = ranking.take
    taken = {bid.worker for bid in take}
    return Offers(
        take=tuple(_offer(bid, best) for bid in take),
        more=tuple(_offer(bid, best) for bid in ranking.bids if bid.worker not in taken),
        elsewhere=None if ranking.elsewhere is None else _offer(ranking.elsewhere, best[:1]),
        left_out=ranking.left_out,
        begin_within_ms=begin_within_ms,
        hold_ms=ranking.hold_ms,
    )


def _offer(bid: Bid, best: Sequence[Bid]) -> Offer:
    other = next((other.total_ms for other in best if other is not bid), bid.weight_ms + NOBODY_ELSE_MS)
    return Offer(bid.worker, bid.cost_ms, other, bid.kv_tokens, bid.burden_ms)
