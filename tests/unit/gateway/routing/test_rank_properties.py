"""The ranking looks at few workers, and finds what looking at all of them would find."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from gateway.routing.cost import Estimate, Needs, Price, needs_of
from gateway.routing.placement import MAX_BIDS, Ask
from gateway.routing.pool import SPEED_STEP, Pool
from gateway.routing.rank import rank
from tests.support.ranked import NOW, Sent, book_of, busy, prompt, worker
from workers.protocol.heartbeat import Heartbeat

HEADS = {digest << 40: 900 * digest for digest in range(1, 9)}
ADAPTERS = ("x", "y")


@dataclass(frozen=True, slots=True)
class Scene:
    pool: Pool
    ask: Ask
    sent: Sent
    avoid: frozenset[str]
    turn: int


def some_worker(source: random.Random, name: str, speeds: Sequence[float]) -> Heartbeat:
    load = busy(
        prefill_ms=source.choice(speeds),
        slots_busy=source.randint(0, 4),
        waiting=source.randint(0, 2),
        backlog_tokens=source.choice([0, 0, 500, 4000]),
        free_in_ms=source.choice([0.0, 300.0, 2500.0]),
        kv_tokens_used=source.choice([0, 0, 9_999_999]),
    )
    return worker(
        name,
        load=load,
        draining=source.random() < 0.1,
        n_ctx=source.choice([4096, 32_768]),
        adapters=source.choice([ADAPTERS, ADAPTERS, ("x",)]),
        adapters_resident=source.choice([(), ("x",)]),
        adapter_load_ms=400.0,
        adapter_room=source.choice([0, 1, 8]),
    )


def some_scene(seed: int, speeds: Sequence[float]) -> Scene:
    """Workers have beginnings of the prompt, and most have one of them."""
    source = random.Random(seed)
    names = [f"w{n}" for n in range(source.randint(1, 60))]
    usual = source.randint(0, 8)
    depths = [source.choice([usual, usual, 0, 8, source.randint(0, 8)]) for _ in names]
    num_bytes = source.choice([10, 900, 7500, 30_000])
    ask = prompt(
        num_bytes,
        {head: end for head, end in HEADS.items() if end <= num_bytes},
        adapters=frozenset(source.choice([(), (), ("x",), ("y",), ("z",)])),
        slot=source.choice([-1, -1, -1, 3, 500]),
        max_tokens=source.choice([None, 5]),
    )
    book = book_of(
        [some_worker(source, name, speeds) for name in names],
        {name: list(HEADS)[:depth] for name, depth in zip(names, depths, strict=True)},
    )
    moved = {name: (source.randint(0, 6), source.choice([0.0, 800.0])) for name in names if source.random() < 0.3}
    avoid = frozenset(name for name in names if source.random() < 0.05)
    return Scene(book.pool, ask, Sent(moved), avoid, source.randrange(1000))


def everyone(pool: Pool, ask: Ask, sent: Sent, avoid: frozenset[str]) -> tuple[Needs, list[Estimate]]:
    """By looking at each worker."""
    price = Price(ask, pool, sent, NOW, 0)
    for needs in needs_of(ask, pool, avoid):
        fit = [there for there in pool.standings.values() if not needs.lacking(there)]
        if fit:
            looked = [price.at(there, _cached(pool, ask, there.number)) for there in fit]
            return needs, sorted(looked, key=lambda estimate: estimate.total_ms)
    return Needs(), []


def _cached(pool: Pool, ask: Ask, number: int) -> int:
    have = [end for head, end in _heads(ask).items() if _holds(pool, head, number)]
    return max(have, default=0)


def _heads(ask: Ask) -> Mapping[int, int]:
    return dict(zip(ask.prefix.digests, ask.prefix.ends, strict=True))


def _holds(pool: Pool, head: int, number: int) -> bool:
    holders = pool.heads.holders(head)
    return number == holders if isinstance(holders, int) else number in holders


@pytest.mark.parametrize("seed", range(100))
def test_the_best_of_all_are_found_where_workers_are_alike(seed: int) -> None:
    scene = some_scene(seed, (1.0,))
    needs, looked = everyone(scene.pool, scene.ask, scene.sent, scene.avoid)
    ranking = rank(scene.ask, scene.pool, scene.sent, now=NOW, avoid=scene.avoid, turn=scene.turn)
    assert [bid.total_ms for bid in ranking.bids] == pytest.approx([e.total_ms for e in looked[:MAX_BIDS]])
    assert not any(needs.lacking(scene.pool.standings[bid.worker]) for bid in ranking.bids)
    assert len({bid.worker for bid in ranking.bids}) == len(ranking.bids)
    if len(looked) > MAX_BIDS:
        serving = [there for there in scene.pool.standings.values() if not there.beat.draining]
        assert ranking.elsewhere is not None
        assert ranking.elsewhere.total_ms == pytest.approx(looked[MAX_BIDS].total_ms)
        assert ranking.left_out == {there.worker for there in serving if needs.lacking(there)}
    else:
        assert (ranking.elsewhere, ranking.left_out) == (None, frozenset())


@pytest.mark.parametrize("seed", range(100))
def test_the_best_is_nearly_found_where_workers_are_not_alike(seed: int) -> None:
    scene = some_scene(seed, (0.2, 0.21, 0.24, 1.0, 1.1, 1.2))
    needs, looked = everyone(scene.pool, scene.ask, scene.sent, scene.avoid)
    bids = rank(scene.ask, scene.pool, scene.sent, now=NOW, avoid=scene.avoid, turn=scene.turn).bids
    assert len(bids) == min(MAX_BIDS, len(looked))
    assert [bid.total_ms for bid in bids] == sorted(bid.total_ms for bid in bids)
    assert not any(needs.lacking(scene.pool.standings[bid.worker]) for bid in bids)
    for bid, best in zip(bids, looked, strict=False):
        assert bid.total_ms <= best.total_ms * SPEED_STEP + 1e-6


def test_a_large_pool_is_ranked_as_well_as_by_looking_at_all() -> None:
    """Heads that a few, many and all of a thousand workers have, under load."""
    source = random.Random(7)
    names = [f"w{n}" for n in range(1000)]
    there = [
        worker(name, load=busy(slots_busy=source.randrange(5), backlog_tokens=source.choice([0, 300, 3000])))
        for name in names
    ]
    heads = {name: list(HEADS)[: min(8, int(source.paretovariate(0.7)))] for name in names}
    pool = book_of(there, heads).pool
    for turn in range(12):
        sent = Sent({name: (source.randrange(3), 500.0) for name in source.sample(names, 100)})
        ask = prompt(source.choice([7300, 9000]), HEADS)
        _, looked = everyone(pool, ask, sent, frozenset())
        ranking = rank(ask, pool, sent, now=NOW, turn=turn)
        assert [bid.total_ms for bid in ranking.bids] == pytest.approx([e.total_ms for e in looked[:MAX_BIDS]])
