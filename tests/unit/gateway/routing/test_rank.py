"""The ranking, as a table of fleets and calls."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.rank import rank
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import Heartbeat


def pool(*slots: int) -> list[Heartbeat]:
    return [heartbeat(f"w{number}", slots=count) for number, count in enumerate(slots)]


def test_most_free_slots_come_first() -> None:
    assert rank(pool(2, 8, 4), {}).order == ("w1", "w2", "w0")


def test_known_leases_count_before_the_heartbeat() -> None:
    assert rank(pool(8, 8), {"w0": 5}).order == ("w1", "w0")
    assert rank(pool(8, 8), None).order == ("w0", "w1")


def test_full_workers_stay_in_the_order_because_redis_knows_better() -> None:
    assert rank(pool(1, 1), {"w0": 1, "w1": 1}).order == ("w0", "w1")


def test_draining_workers_are_left_out_and_say_so() -> None:
    ranking = rank([heartbeat("w0", draining=True), heartbeat("w1")], {})
    assert ranking.order == ("w1",)
    assert ranking.reasons == {"w0": "left out: it is draining", "w1": "2 of 2 slots free"}


def test_avoided_workers_are_left_out_while_another_is_there() -> None:
    assert rank(pool(8, 1), {"w1": 1}, frozenset({"w0"})).order == ("w1",)


def test_avoided_workers_are_used_when_no_other_is_there() -> None:
    ranking = rank([heartbeat("w0"), heartbeat("w1", draining=True)], {}, frozenset({"w0"}))
    assert ranking.order == ("w0",)
    assert ranking.reasons["w0"] == "2 of 2 slots free, last: this call has failed there"


def test_an_empty_pool_has_an_empty_ranking() -> None:
    assert rank([], {}).order == ()


def test_equals_take_turns_evenly() -> None:
    first = Counter(rank(pool(4, 4, 4, 2), {}, turn=turn).order[0] for turn in range(30))
    assert first == {"w0": 10, "w1": 10, "w2": 10}


@given(
    slots=st.lists(st.integers(1, 9), max_size=6),
    busy=st.dictionaries(st.sampled_from([f"w{n}" for n in range(6)]), st.integers(0, 9)),
    avoid=st.frozensets(st.sampled_from([f"w{n}" for n in range(6)])),
    turn=st.integers(0, 1000),
)
def test_every_order_is_sorted_and_complete(
    slots: list[int], busy: dict[str, int], avoid: frozenset[str], turn: int
) -> None:
    workers = pool(*slots)
    ranking = rank(workers, busy, avoid, turn)
    names = {worker.worker for worker in workers}
    assert set(ranking.order) == (names - avoid or names)
    assert len(set(ranking.order)) == len(ranking.order)
    free = {candidate.worker: candidate.free for candidate in ranking.candidates}
    assert [free[worker] for worker in ranking.order] == sorted((free[w] for w in ranking.order), reverse=True)
    assert set(ranking.reasons) == names
