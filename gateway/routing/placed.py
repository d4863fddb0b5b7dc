"""Writes one line about a call's placement: the worker chosen and the best others, with their costs. Pure."""

from __future__ import annotations

from gateway.routing.ask import Bid, Ranking

MAX_OTHERS = 3
"""Most workers in the line beside the one that the call went to."""


def bid_for(ranking: Ranking, worker: str) -> Bid | None:
    """Return the ranking's bid for a worker, `elsewhere` for one without its own; None: there is neither."""
    for bid in ranking.bids:
        if bid.worker == worker:
            return bid
    return ranking.elsewhere


def summary(ranking: Ranking, worker: str) -> str:
    """Return the worker first, then others: `w1 wait_ms=0 cost_ms=41 burden_ms=40 cached=512; w2 ...`."""
    chosen = bid_for(ranking, worker)
    told = [f"{worker} {_figures(chosen)}" if chosen else f"{worker} unranked"]
    others = [bid for bid in ranking.bids if bid.worker != worker]
    told += [f"{bid.worker} {_figures(bid)}" for bid in others[:MAX_OTHERS]]
    return "; ".join(told)


def _figures(bid: Bid) -> str:
    return (
        f"wait_ms={bid.wait_ms:.0f} cost_ms={bid.cost_ms:.0f} burden_ms={bid.burden_ms:.0f} cached={bid.cached_tokens}"
    )
