"""The points of the comparison with other systems that load models hold for Paddock; a neighbour is seen as well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.models import OURS, Outcomes, compared, storm
from benchmarks.models.calls import calling
from benchmarks.models.files import SIX, files
from benchmarks.models.scenarios import POINTS
from benchmarks.models.systems import SYSTEMS
from tests.support.real_server import built_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def models() -> Mapping[str, Path]:
    return files()


def seen(system: str, points: Sequence[str], models: Mapping[str, Path]) -> Outcomes:
    return asyncio.run(compared([system], points, models))


def test_a_few_points_hold(models: Mapping[str, Path]) -> None:
    found = seen(OURS, ("lru", "autoload"), models)
    assert all(outcome.is_good for outcome in found.values()), found


def test_all_points_hold(models: Mapping[str, Path]) -> None:
    found = seen(OURS, [*POINTS], models)
    assert {point for (point, _), outcome in found.items() if not outcome.is_good} == set(), found


def test_the_router_is_seen_in_the_same_way(models: Mapping[str, Path]) -> None:
    built_server()
    found = seen("llama-server", ("lru", "coalesced"), models)
    assert all(outcome.is_good for outcome in found.values()), found


def test_a_small_storm_is_answered(models: Mapping[str, Path]) -> None:
    async def stormed() -> storm.Storm:
        with SYSTEMS[OURS]({name: models[name] for name in SIX}, True) as system:
            async with calling(system) as caller:
                return await storm.run(caller, 60)

    done = asyncio.run(stormed())
    assert all(answer.is_answered for answer in done.answers)
    assert 0 < done.num_loads < len(done.answers)
