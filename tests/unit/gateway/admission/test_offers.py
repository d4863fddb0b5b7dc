"""What a waiting call's ticket tells of its workers."""

from __future__ import annotations

from gateway.admission.ranker import NOBODY_ELSE_MS, offers_of
from gateway.routing.placement import Bid, Ranking


def test_a_worker_is_compared_with_the_best_other_one() -> None:
    first = Bid("w1", 0.0, 100.0, 7, 0, burden_ms=30.0)
    second = Bid("w2", 50.0, 200.0, 7, 0, burden_ms=20.0)
    third = Bid("w3", 500.0, 200.0, 7, 0)
    offers = offers_of(Ranking((first, second, third)), 0.0)
    told = {offer.worker: offer for offer in (*offers.take, *offers.more)}
    assert (told["w1"].other_ms, told["w1"].other_burden_ms) == (250.0, 20.0)
    assert (told["w2"].other_ms, told["w2"].other_burden_ms) == (100.0, 30.0)
    assert (told["w3"].other_ms, told["w3"].other_burden_ms) == (100.0, 30.0)
    rate, kv_tokens, cost_ms, other_ms = told["w1"].packed(hold_ms=899.0).split()
    assert (float(rate), int(kv_tokens), float(cost_ms)) == (0.14, 7, 100.0), "it would lose 270 - 130 ms"
    assert float(other_ms) == 250.0, "a deadline is missed by the call's own time, whatever others lose there"


def test_an_only_worker_is_worth_any_wait() -> None:
    offers = offers_of(Ranking((Bid("w1", 0.0, 100.0, 7, 0, burden_ms=30.0),)), 0.0)
    [offer] = (*offers.take, *offers.more)
    assert offer.other_ms == 100.0 + NOBODY_ELSE_MS
    assert offer.packed(hold_ms=0.0).startswith(f"{NOBODY_ELSE_MS / 101:.9g} ")
