"""Why workers stand where they do, and that it is what the ranking does."""

from __future__ import annotations

import pytest

from gateway.routing.explain import ExcludedWorker, Explanation, RankedWorker, explain
from gateway.routing.pool import Pool
from gateway.routing.rank import rank
from tests.support.ranked import NOW, Sent, book_of, busy, full, prompt, worker
from tests.unit.gateway.routing.test_rank_properties import some_scene
from workers.protocol.heartbeat import PROTOCOL_VERSION


def sums(one: RankedWorker) -> list[float]:
    parts = one.slot_ms, one.backlog_ms, one.prefill_ms, one.adapter_ms, one.cost_ms
    return [one.total_ms - one.burden_ms, one.wait_ms, *parts]


def test_each_term_of_the_sum_is_told() -> None:
    book = book_of(
        [
            worker("a", load=full(250.0, waiting=1), adapters=("x",), adapter_load_ms=200.0),
            worker("b", load=busy(slots_busy=1, backlog_tokens=40), adapters=("x",), adapters_resident=("x",)),
        ],
        {"a": [1]},
    )
    request = prompt(1000, {1: 900}, adapters=frozenset({"x"}))
    told = explain(request, book.pool, Sent({"b": (2, 30.0)}), now=NOW + 0.01)
    first, second = told.ranked
    assert sums(first) == pytest.approx([1540, 1240, 1240, 0, 100, 200, 300])
    assert (first.worker, first.cached_tokens, first.uncached_tokens) == ("a", 900, 100)
    assert (first.free_slots, first.placed) == (-1, 0)
    assert sums(second) == pytest.approx([1060, 60, 0, 60, 1000, 0, 1000])
    assert (second.worker, second.cached_tokens, second.uncached_tokens) == ("b", 0, 1000)
    assert (second.free_slots, second.placed) == (3, 2)
    assert first.burden_ms < second.burden_ms
    assert first.heard_s_ago == pytest.approx(0.01)


def test_who_is_left_out_is_told_why() -> None:
    book = book_of(
        [
            worker("tired", draining=True),
            worker("wanted", draining=True, reserved=True),
            worker("odd", protocol=99),
            worker("small", n_ctx=500),
            worker("plain"),
            worker("bad", adapters=("x", "y")),
            worker("good", adapters=("x", "y")),
        ]
    )
    request = prompt(1000, adapters=frozenset({"y", "x"}))
    told = explain(request, book.pool, Sent(), now=NOW, avoid=frozenset({"bad"}))
    assert [placed.worker for placed in told.ranked] == ["good"]
    assert told.left_out == (
        ExcludedWorker("bad", "this call has failed there"),
        ExcludedWorker("odd", f"it speaks protocol 99, this gateway {PROTOCOL_VERSION}"),
        ExcludedWorker("plain", "it has no adapter x, y"),
        ExcludedWorker("small", "the call needs at least 750 tokens of context, it has 500"),
        ExcludedWorker("tired", "it is draining"),
        ExcludedWorker("wanted", "it is reserved for another worker"),
    )
    slotted = explain(prompt(5, slot=4), book.pool, Sent(), now=NOW)
    assert [placed.worker for placed in slotted.ranked] == ["good"]
    assert ExcludedWorker("bad", "the call asked for a slot of good") in slotted.left_out


def test_what_no_worker_has_is_waived() -> None:
    book = book_of([worker("a", n_ctx=500), worker("b", n_ctx=500, draining=True)])
    request = prompt(1000, adapters=frozenset({"x"}), slot=6)
    told = explain(request, book.pool, Sent(), now=NOW, avoid=frozenset({"a"}))
    assert told.waived == ("slot", "context", "adapters", "avoided")
    assert [placed.worker for placed in told.ranked] == ["a"]


def test_nobody_is_there() -> None:
    assert explain(prompt(5), Pool(), Sent(), now=NOW) == Explanation()
    pool = book_of([worker("a", draining=True)]).pool
    assert explain(prompt(5), pool, Sent(), now=NOW) == Explanation((), (ExcludedWorker("a", "it is draining"),))


@pytest.mark.parametrize("seed", range(50))
def test_it_tells_what_the_ranking_does(seed: int) -> None:
    scene = some_scene(seed, (1.0,))
    ranking = rank(scene.request, scene.pool, scene.sent, now=NOW, avoid=scene.avoid)
    told = explain(scene.request, scene.pool, scene.sent, now=NOW, avoid=scene.avoid)
    assert [bid.total_ms for bid in ranking.bids] == [one.total_ms for one in told.ranked[: len(ranking.bids)]]
    by_worker = {one.worker: one for one in told.ranked}
    for bid in ranking.bids:
        one = by_worker[bid.worker]
        assert (one.wait_ms, one.cost_ms, one.cached_tokens) == (bid.wait_ms, bid.cost_ms, bid.cached_tokens)
    assert {*by_worker, *(one.worker for one in told.left_out)} == set(scene.pool.states)
