"""Why a call went where it did, in one line."""

from __future__ import annotations

from gateway.routing.placement import Bid, Ranking

RANKING = Ranking(
    (
        Bid("w1", 0.0, 41.4, 700, 512, 40.0),
        Bid("w2", 3.6, 120.0, 1200, 0),
        *(Bid(f"x{n}", 9, 120, 9, 0) for n in range(4)),
    ),
    elsewhere=Bid("w9", 10.0, 200.0, 1300, 0),
)


def test_the_worker_that_it_went_to_comes_first() -> None:
    assert RANKING.summary("w2").startswith(
        "w2 wait_ms=4 cost_ms=120 burden_ms=0 cached=0; w1 wait_ms=0 cost_ms=41 burden_ms=40 cached=512; x0 "
    )
    assert RANKING.summary("w1").count(";") == 3


def test_a_worker_without_a_bid_costs_what_any_other_does() -> None:
    assert RANKING.bid_for("w7") == RANKING.elsewhere
    assert RANKING.summary("w7").startswith("w7 wait_ms=10 cost_ms=200 burden_ms=0 cached=0; w1 ")
    assert Ranking(()).summary("w7") == "w7 unranked"
