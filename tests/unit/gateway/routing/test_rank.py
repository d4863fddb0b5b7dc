"""The ranking, as a table of pools and calls."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from gateway.routing.cost import RecentPlacements
from gateway.routing.placement import (
    MAX_BIDS,
    PlacedMedium,
    PlacementRequest,
    Ranking,
    placement_request_of_pooled,
)
from gateway.routing.pool import Pool, PoolUpdater
from gateway.routing.rank import rank
from tests.support.ranked import MEASURED, NOW, Sent, book_of, busy, full, prompt, worker
from workers.protocol.heartbeat import PROTOCOL_VERSION, Heartbeat, Load
from workers.protocol.pooled import PoolPrompt, PoolRequest
from workers.protocol.requests import Medium

NOBODY: frozenset[str] = frozenset()


def ranked(
    book: PoolUpdater,
    request: PlacementRequest,
    recent: RecentPlacements | None = None,
    *,
    queued: int = 0,
    avoid: frozenset[str] = NOBODY,
) -> Ranking:
    return rank(request, book.pool, recent or Sent(), now=NOW, queued=queued, avoid=avoid)


def order(ranking: Ranking) -> list[str]:
    return [bid.worker for bid in ranking.bids]


def totals(ranking: Ranking) -> dict[str, object]:
    """Until the first token, what that costs others left aside."""
    return {bid.worker: pytest.approx(bid.wait_ms + bid.cost_ms) for bid in ranking.bids}


def test_a_pool_of_nobody_ranks_nobody_and_charges_all_the_same() -> None:
    """Calls wait for the first worker, in fair order."""
    few, many = (rank(prompt(number), Pool(), Sent(), now=NOW) for number in (10, 4000))
    assert (few.bids, few.elsewhere) == (many.bids, many.elsewhere) == ((), None)
    assert 0 < few.charge < many.charge


def test_the_cost_is_what_is_not_cached() -> None:
    book = book_of([worker("a"), worker("b"), worker("c")], {"b": [1], "c": [1, 2]})
    ranking = ranked(book, prompt(1000, {1: 300, 2: 800, 3: 900}))
    assert totals(ranking) == {"c": 200, "b": 700, "a": 1000}
    assert order(ranking) == ["c", "b", "a"]
    assert [bid.cached_tokens for bid in ranking.bids] == [800, 300, 0]
    assert [bid.kv_tokens for bid in ranking.bids] == [300, 800, 1100]
    assert ranking.charge == pytest.approx(300)
    assert ranking.hold_ms == pytest.approx(1000)


def test_a_deep_head_counts_without_the_ones_before_it() -> None:
    book = book_of([worker("a"), worker("b")], {"b": [2]})
    assert totals(ranked(book, prompt(1000, {1: 300, 2: 800}))) == {"b": 200, "a": 1000}


def test_an_answer_is_no_longer_than_asked_for() -> None:
    ranking = ranked(book_of([worker("a")]), prompt(50, max_tokens=7))
    assert (ranking.charge, ranking.hold_ms, ranking.bids[0].kv_tokens) == (57, 70, 57)


@pytest.mark.parametrize(
    ("load", "wait_ms"),
    [
        (MEASURED, 0),
        (busy(slots_busy=3), 0),
        (full(250.0), 250),
        (full(250.0, waiting=2), 250 + 2 * 1000),
        (full(0.0), 1000),
        (busy(backlog_tokens=400), 400),
        (full(250.0, backlog_tokens=400), 400),
        (full(250.0, backlog_tokens=100), 250),
    ],
    ids=["idle", "one free", "full", "two wait", "full, nobody knows", "prompts before", "longer prompts", "shorter"],
)
def test_the_wait_is_for_a_slot_and_for_the_prompts_before(load: Load, wait_ms: float) -> None:
    (bid,) = ranked(book_of([worker("a", load=load)]), prompt(50)).bids
    assert bid.wait_ms == pytest.approx(wait_ms)
    assert bid.cost_ms == pytest.approx(50)


def test_waits_grow_shorter_as_time_goes_on() -> None:
    book = book_of([worker("a", load=full(250.0)), worker("b", load=busy(backlog_tokens=150))])
    later = rank(prompt(50), book.pool, Sent(), now=NOW + 0.1)
    assert [(bid.worker, round(bid.wait_ms)) for bid in later.bids] == [("b", 50), ("a", 150)]
    assert {bid.wait_ms for bid in rank(prompt(50), book.pool, Sent(), now=NOW + 9).bids} == {0}


@pytest.mark.parametrize(
    ("load", "moved", "wait_ms"),
    [
        (MEASURED, (1, 300.0), 300),
        (MEASURED, (4, 0.0), 1000),
        (MEASURED, (6, 0.0), 1000 + 2 * 1000),
        (full(250.0), (-1, 0.0), 0),
        (full(250.0), (1, 0.0), 1250),
        (full(250.0, waiting=1), (-1, 0.0), 250),
        (busy(backlog_tokens=400), (1, 300.0), 700),
    ],
)
def test_what_was_sent_since_the_news_counts(load: Load, moved: tuple[int, float], wait_ms: float) -> None:
    (bid,) = ranked(book_of([worker("a", load=load)]), prompt(50), Sent({"a": moved})).bids
    assert bid.wait_ms == pytest.approx(wait_ms)


def test_those_in_line_go_first_where_no_slot_is_free() -> None:
    book = book_of([worker("a", load=full(250.0)), worker("b")])
    ranking = ranked(book, prompt(50), queued=4)
    assert totals(ranking) == {"b": 50, "a": 250 + 4 * 4000 / 8 + 50}


def test_a_worker_without_cells_for_it_is_waited_for() -> None:
    tight = worker("a", load=busy(kv_tokens_used=950), kv_tokens=1000)
    ranking = ranked(book_of([tight, worker("b", kv_tokens=1000)]), prompt(50))
    assert totals(ranking) == {"b": 50, "a": 1050}


def test_an_encoder_has_no_cells_to_wait_for() -> None:
    assert totals(ranked(book_of([worker("a", kv_tokens=0)]), prompt(50))) == {"a": 50}


def test_a_free_worker_is_taken_before_a_cached_prompt_that_is_waited_for_longer() -> None:
    book = book_of([worker("a", load=full(500.0)), worker("b")], {"a": [1]})
    short, long = ranked(book, prompt(200, {1: 190})), ranked(book, prompt(900, {1: 890}))
    assert (order(short), order(long)) == (["b", "a"], ["a", "b"])
    assert [bid.worker for bid in short.take] == ["b", "a"]
    assert [bid.worker for bid in long.take] == ["a"]


def test_faster_workers_come_first_and_get_more() -> None:
    slow, fast = worker("slow", load=busy(prefill_ms=3.0)), worker("fast", load=busy(backlog_tokens=900))
    book = book_of([slow, fast])
    assert totals(ranked(book, prompt(200))) == {"slow": 600, "fast": 1100}
    assert order(ranked(book, prompt(200))) == ["slow", "fast"]
    assert totals(ranked(book, prompt(1000))) == {"fast": 1900, "slow": 3000}
    assert order(ranked(book, prompt(1000))) == ["fast", "slow"]


def test_what_is_computed_twice_costs_others() -> None:
    """b would be the quicker by a little, and would throw out what others have there."""
    book = book_of([worker("a", load=busy(backlog_tokens=500)), worker("b")], {"a": [1]})
    ranking = ranked(book, prompt(400, {1: 390}))
    assert totals(ranking) == {"a": 510, "b": 400}
    assert [(bid.worker, bid.burden_ms) for bid in ranking.bids] == [("a", 10), ("b", 400)]


def test_an_adapter_that_is_not_in_memory_costs_its_loading() -> None:
    state = [
        worker("a", adapters=("x", "y"), adapters_resident=("x",), adapter_load_ms=200.0),
        worker("b", adapters=("x", "y"), adapter_load_ms=300.0),
        worker("c", adapters=("x", "y"), adapters_resident=("x", "y")),
        worker("d", adapters=("x",)),
    ]
    ranking = ranked(book_of(state), prompt(50, adapters=frozenset({"x", "y"})))
    assert totals(ranking) == {"c": 50, "a": 250, "b": 650}


def test_a_worker_whose_places_for_adapters_are_all_in_use_is_passed_by() -> None:
    taken = worker("taken", adapters=("x", "y"), adapters_resident=("x",), adapter_room=0)
    free = worker("free", adapters=("x", "y"), adapter_room=1, load=busy(prefill_ms=9.0), adapter_load_ms=400.0)
    book = book_of([taken, free])
    assert order(ranked(book, prompt(50, adapters=frozenset({"y"})))) == ["free"]
    assert ranked(book, prompt(50, adapters=frozenset({"x"}))).bids[0].worker == "taken"
    # Nobody has two places: it waits for them, wherever that is.
    assert set(order(ranked(book, prompt(50, adapters=frozenset({"x", "y"}))))) == {"free", "taken"}


def test_draining_workers_get_nothing() -> None:
    assert order(ranked(book_of([worker("a", draining=True), worker("b")]), prompt(9))) == ["b"]
    nobody = ranked(book_of([worker("a", draining=True)]), prompt(9))
    assert (nobody.bids, nobody.elsewhere) == ((), None)
    assert nobody.charge > 0


def test_workers_of_another_protocol_get_nothing() -> None:
    assert order(ranked(book_of([worker("a", protocol=PROTOCOL_VERSION + 1), worker("b")]), prompt(9))) == ["b"]


def test_a_prompt_goes_where_it_has_room_and_anywhere_if_nowhere() -> None:
    book = book_of([worker("small", n_ctx=1000), worker("large", n_ctx=8000)])
    assert set(order(ranked(book, prompt(1300)))) == {"small", "large"}  # an estimate: the worker counts
    assert order(ranked(book, prompt(1400))) == ["large"]
    assert set(order(ranked(book, prompt(20_000)))) == {"small", "large"}  # and refuses


def test_a_call_goes_where_its_adapters_are_and_anywhere_if_nowhere() -> None:
    book = book_of([worker("a"), worker("b", adapters=("x",)), worker("c", adapters=("x", "y"))])
    assert set(order(ranked(book, prompt(9, adapters=frozenset({"x"}))))) == {"b", "c"}
    assert order(ranked(book, prompt(9, adapters=frozenset({"x", "y"})))) == ["c"]
    assert set(order(ranked(book, prompt(9, adapters=frozenset({"unheard"}))))) == {"a", "b", "c"}


def test_a_worker_that_has_failed_the_call_is_used_only_if_no_other_would_do() -> None:
    book = book_of([worker("a"), worker("b", adapters=("x",))])
    assert order(ranked(book, prompt(9), avoid=frozenset({"a"}))) == ["b"]
    assert set(order(ranked(book, prompt(9), avoid=frozenset({"a", "b"})))) == {"a", "b"}
    assert order(ranked(book, prompt(9, adapters=frozenset({"x"})), avoid=frozenset({"b"}))) == ["b"]


def test_a_slot_is_waited_for_at_its_own_worker_while_that_serves() -> None:
    book = book_of([worker("b", load=full(5000.0)), worker("a"), worker("c", draining=True)])
    ranking = ranked(book, prompt(9, slot=5))  # workers by id: a has 0-3, b 4-7, c 8-11
    assert (order(ranking), ranking.elsewhere) == (["b"], None)
    assert set(order(ranked(book, prompt(9, slot=9)))) == {"a", "b"}
    assert set(order(ranked(book, prompt(9, slot=99)))) == {"a", "b"}
    assert order(ranked(book, prompt(9, slot=5), avoid=frozenset({"b"}))) == ["a"]


def test_there_are_so_many_bids_and_one_for_all_others() -> None:
    many = [worker(f"w{n:02}", load=busy(backlog_tokens=10 * n)) for n in range(20)]
    ranking = ranked(book_of(many), prompt(50))
    assert order(ranking) == [f"w{n:02}" for n in range(MAX_BIDS)]
    assert ranking.elsewhere is not None
    assert ranking.elsewhere.total_ms == pytest.approx(2 * 50 + 10 * MAX_BIDS)
    assert ranked(book_of(many[:MAX_BIDS]), prompt(50)).elsewhere is None


def test_who_would_not_do_is_named_beside_those_elsewhere() -> None:
    many = [worker(f"w{n:02}", adapters=("x",)) for n in range(20)]
    unmet_by = [worker(f"l{n:02}") for n in range(70)]
    request = prompt(9, adapters=frozenset({"x"}))
    assert ranked(book_of([*many, *unmet_by[:3]]), request).left_out == {"l00", "l01", "l02"}
    assert ranked(book_of(many), request, avoid=frozenset({"w03", "gone"})).left_out == {"w03"}
    assert ranked(book_of(many), request).left_out == NOBODY
    too_many = ranked(book_of([*many, *unmet_by]), request)
    assert (too_many.elsewhere, too_many.left_out, len(too_many.bids)) == (None, NOBODY, MAX_BIDS)


@pytest.mark.parametrize("count", [3, 4, 40])
def test_equals_take_turns_evenly(count: int) -> None:
    pool = book_of([worker(f"w{n}") for n in range(count)] + [worker("late", load=full(9.0))]).pool
    first = Counter(rank(prompt(5), pool, Sent(), now=NOW, turn=turn).bids[0].worker for turn in range(count * 5))
    assert first == {f"w{n}": 5 for n in range(count)}


@pytest.mark.parametrize("count", [2, 3, 40])
def test_equals_that_have_the_prompt_take_turns(count: int) -> None:
    names = [f"w{n}" for n in range(count)]
    pool = book_of([worker(name) for name in [*names, "cold"]], {name: [1] for name in names}).pool
    request = prompt(500, {1: 400})
    first = Counter(rank(request, pool, Sent(), now=NOW, turn=turn).bids[0].worker for turn in range(count * 5))
    assert set(first) == set(names)
    assert max(first.values()) <= 2 * 5  # who stands behind the one that has it not gets its turns as well


def test_a_prompt_that_everyone_shares_makes_no_hot_spot() -> None:
    """Calls come faster than news: what was sent is all that tells of them."""
    names = [f"w{n:02}" for n in range(50)]
    pool = book_of([worker(name) for name in names], {"w00": [1, 2]} | {name: [1] for name in names[1:]}).pool
    sent = Sent()
    for turn in range(500):
        best = rank(prompt(1000, {1: 800, 2: 900}), pool, sent, now=NOW, turn=turn).bids[0]
        calls, ms = sent.moves.get(best.worker, (0, 0.0))
        sent.moves[best.worker] = calls + 1, ms + best.cost_ms
    assert max(calls for calls, _ in sent.moves.values()) <= 12
    assert len(sent.moves) == 50


def test_what_no_worker_has_measured_is_the_same_for_all() -> None:
    unknown = Load()
    ranking = ranked(
        book_of([worker("a", load=unknown), worker("b", load=unknown)], {"b": [1]}), prompt(4000, {1: 400})
    )
    assert order(ranking) == ["b", "a"]
    assert all(bid.cost_ms > 0 for bid in ranking.bids)


def test_what_one_worker_has_not_measured_is_what_is_usual_in_its_pool() -> None:
    book = book_of([worker("new", load=Load()), *(worker(f"w{n}", load=busy(prefill_ms=n)) for n in (1, 2, 9))])
    assert totals(ranked(book, prompt(100))) == {"w1": 100, "new": 200, "w2": 200, "w9": 900}
    full_up = busy(slots_busy=4, prefill_ms=0.0, hold_ms=0.0)
    book.renew(worker("new", load=full_up), now=NOW)
    assert totals(ranked(book, prompt(100)))["new"] == 1200


def test_a_prompt_is_no_longer_on_a_worker_that_has_seen_longer_words() -> None:
    book = book_of([worker(f"w{n}", load=busy(bytes_per_token=n)) for n in (1, 2, 3)])
    assert totals(ranked(book, prompt(100))) == {"w1": 50, "w2": 50, "w3": 50}


def test_a_record_is_no_older_than_the_news_that_it_knows() -> None:
    book = book_of([worker("a", load=busy(slots_busy=1))])
    book.renew(worker("a", load=busy(slots_busy=2)), now=NOW - 0.5)
    assert book.pool.states["a"].heard_at == NOW
    book.renew(worker("a", load=busy(slots_busy=3)), now=NOW + 0.5)
    assert book.pool.states["a"].heard_at == NOW + 0.5


def test_a_prompt_beyond_the_context_asks_for_no_more_cells_than_a_context_has() -> None:
    ranking = ranked(book_of([worker("a", n_ctx=500, kv_tokens=2000)]), prompt(100_000))
    assert [bid.kv_tokens for bid in ranking.bids] == [500]


def sees(name: str, encode_ms: float = 2.0, **facts: object) -> Heartbeat:
    """A worker whose pictures take 400 cells, and whose sounds 100."""
    known = worker("x").facts
    cells = msgspec.structs.replace(known, picture_cells=400, sound_cells=100, inputs=("text", "image", "audio"))
    return worker(name, load=busy(encode_ms=encode_ms), facts=cells, **facts)


def test_pictures_cost_their_cells_where_they_are_not_cached() -> None:
    book = book_of([sees("a"), sees("b")], {"b": [1]})
    media = (PlacedMedium("picture", 200), PlacedMedium("sound", 900))
    ranking = ranked(book, prompt(1000, {1: 300, 2: 950}, media=media))
    # Of each cell three milliseconds: it is encoded, and computed as a token is.
    assert totals(ranking) == {"b": 700 + 3 * 100, "a": 1000 + 3 * 500}
    assert [bid.kv_tokens for bid in ranking.bids] == [700 + 100 + 100, 1000 + 500 + 100]


def test_quicker_encoders_are_taken_for_pictures() -> None:
    book = book_of([sees("a", 5.0), sees("b", 1.0)])
    assert order(ranked(book, prompt(10, media=(PlacedMedium("picture", 5),)))) == ["b", "a"]


def test_pictures_need_room_in_the_context() -> None:
    book = book_of([sees("a", n_ctx=200), sees("b", n_ctx=1000)])
    assert order(ranked(book, prompt(10, media=(PlacedMedium("picture", 5),)))) == ["b"]
    assert set(order(ranked(book, prompt(10)))) == {"a", "b"}


def test_pictures_go_to_workers_that_take_them() -> None:
    """While a projector is rolled out, some of a model's workers read text only."""
    media = (PlacedMedium("picture", 5),)
    book = book_of([worker("a"), sees("b"), worker("c")])
    assert order(ranked(book, prompt(10, media=media))) == ["b"]
    assert set(order(ranked(book_of([worker("a"), worker("c")]), prompt(10, media=media)))) == {"a", "c"}


def test_pictures_to_embed_go_to_workers_that_take_them_however_much_there_is() -> None:
    """All inputs together may be more than a context; still no worker may answer with vectors of the texts alone."""
    inputs = (PoolPrompt(text="a" * 40, media=(3,)), "b" * 400_000)
    asked = placement_request_of_pooled(PoolRequest(inputs=inputs, media=(Medium("picture", b"x"),)))
    short = [worker("a", n_ctx=1000), sees("b", n_ctx=1000), worker("c", n_ctx=1000)]
    assert order(ranked(book_of(short), asked)) == ["b"]
    small = placement_request_of_pooled(PoolRequest(inputs=inputs[:1], media=(Medium("picture", b"x"),)))
    ranking = ranked(book_of([sees("a", 5.0), sees("b", 1.0)]), small)
    assert order(ranking) == ["b", "a"], "by how quickly they encode it"
    assert ranking.bids[0].kv_tokens > 400
