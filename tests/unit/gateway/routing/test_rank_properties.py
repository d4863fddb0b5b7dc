"""The ranking looks at few workers, and finds what looking at all of them would find."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from gateway.routing.cost import CostModel, Estimate, Requirements, requirements_of
from gateway.routing.placement import MAX_BIDS, PlacementRequest
from gateway.routing.pool import SPEED_STEP, Pool
from gateway.routing.rank import rank
from tests.support.ranked import NOW, Sent, book_of, busy, prompt, worker
from workers.protocol.heartbeat import Heartbeat

HEADS = {digest << 40: 900 * digest for digest in range(1, 9)}
ADAPTERS = ("x", "y")


@dataclass(frozen=True, slots=True)
class Scene:
    pool: Pool
    request: PlacementRequest
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
    request = prompt(
        num_bytes,
        {prefix_hash: end for prefix_hash, end in HEADS.items() if end <= num_bytes},
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
    return Scene(book.pool, request, Sent(moved), avoid, source.randrange(1000))


def everyone(
    pool: Pool, request: PlacementRequest, sent: Sent, avoid: frozenset[str]
) -> tuple[Requirements, list[Estimate]]:
    """By looking at each worker."""
    costs = CostModel(request, pool, sent, NOW, 0)
    for requirements in requirements_of(request, pool, avoid):
        fit = [state for state in pool.states.values() if not requirements.unmet_by(state)]
        if fit:
            looked = [costs.at(state, _cached(pool, request, state.number)) for state in fit]
            return requirements, sorted(looked, key=lambda estimate: estimate.total_ms)
    return Requirements(), []


def _cached(pool: Pool, request: PlacementRequest, number: int) -> int:
    have = [end for prefix_hash, end in _hashes(request).items() if _holds(pool, prefix_hash, number)]
    return max(have, default=0)


def _hashes(request: PlacementRequest) -> Mapping[int, int]:
    return dict(zip(request.prefix.digests, request.prefix.ends, strict=True))


def _holds(pool: Pool, prefix_hash: int, number: int) -> bool:
    holders = pool.hashes.holders(prefix_hash)
    return number == holders if isinstance(holders, int) else number in holders


@pytest.mark.parametrize("seed", range(100))
def test_the_best_of_all_are_found_where_workers_are_alike(seed: int) -> None:
    scene = some_scene(seed, (1.0,))
    requirements, looked = everyone(scene.pool, scene.request, scene.sent, scene.avoid)
    ranking = rank(scene.request, scene.pool, scene.sent, now=NOW, avoid=scene.avoid, turn=scene.turn)
    assert [bid.total_ms for bid in ranking.bids] == pytest.approx([e.total_ms for e in looked[:MAX_BIDS]])
    assert not any(requirements.unmet_by(scene.pool.states[bid.worker]) for bid in ranking.bids)
    assert len({bid.worker for bid in ranking.bids}) == len(ranking.bids)
    if len(looked) > MAX_BIDS:
        serving = [state for state in scene.pool.states.values() if not state.beat.draining]
        assert ranking.elsewhere is not None
        assert ranking.elsewhere.total_ms == pytest.approx(looked[MAX_BIDS].total_ms)
        assert ranking.left_out == {state.worker for state in serving if requirements.unmet_by(state)}
    else:
        assert (ranking.elsewhere, ranking.left_out) == (None, frozenset())


@pytest.mark.parametrize("seed", range(100))
def test_the_best_is_nearly_found_where_workers_are_not_alike(seed: int) -> None:
    scene = some_scene(seed, (0.2, 0.21, 0.24, 1.0, 1.1, 1.2))
    requirements, looked = everyone(scene.pool, scene.request, scene.sent, scene.avoid)
    bids = rank(scene.request, scene.pool, scene.sent, now=NOW, avoid=scene.avoid, turn=scene.turn).bids
    assert len(bids) == min(MAX_BIDS, len(looked))
    assert [bid.total_ms for bid in bids] == sorted(bid.total_ms for bid in bids)
    assert not any(requirements.unmet_by(scene.pool.states[bid.worker]) for bid in bids)
    for bid, best in zip(bids, looked, strict=False):
        assert bid.total_ms <= best.total_ms * SPEED_STEP + 1e-6


def test_a_large_pool_is_ranked_as_well_as_by_looking_at_all() -> None:
    """Heads that a few, many and all of a thousand workers have, under load."""
    source = random.Random(7)
    names = [f"w{n}" for n in range(1000)]
    state = [
        worker(name, load=busy(slots_busy=source.randrange(5), backlog_tokens=source.choice([0, 300, 3000])))
        for name in names
    ]
    hashes = {name: list(HEADS)[: min(8, int(source.paretovariate(0.7)))] for name in names}
    pool = book_of(state, hashes).pool
    for turn in range(12):
        sent = Sent({name: (source.randrange(3), 500.0) for name in source.sample(names, 100)})
        request = prompt(source.choice([7300, 9000]), HEADS)
        _, looked = everyone(pool, request, sent, frozenset())
        ranking = rank(request, pool, sent, now=NOW, turn=turn)
        assert [bid.total_ms for bid in ranking.bids] == pytest.approx([e.total_ms for e in looked[:MAX_BIDS]])
