"""Every attack beside a caller of another team, an area's one after the other.

The caller streams on from one attack of an area to the next, so that it feels what an attack leaves behind as well.
The machine is shared with other tests here, so this bounds seconds where an attack took tens of them; the figures that
the project promises are measured by `python -m tests.security` on a quiet machine, which `make test-full` runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.attack import Target
from tests.security.attacks import attacks_by_area
from tests.security.fleet import attacked_fleet
from tests.security.trial import Bounds, try_attacks, undisturbed
from tests.security.victim import Felt

SHORT = Bounds(added_gap_s=1.0, ttft_factor=4.0, ttft_noise_s=2.0)


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Target, dict[str, int]]]:
    with attacked_fleet() as started:
        yield started


@pytest.fixture(scope="module")
def calm_felt() -> list[Felt]:
    """What the victim felt undisturbed, measured once."""
    return []


@pytest.mark.parametrize("area", attacks_by_area())
async def test_an_area_takes_nothing_from_others(
    area: str, fleet: tuple[Target, dict[str, int]], calm_felt: list[Felt]
) -> None:
    target, pids = fleet
    if not calm_felt:
        calm_felt.append(await undisturbed(target))
        assert calm_felt[0].num_streams
        assert not calm_felt[0].errors
    course = [(attack, attack.short_s) for attack in attacks_by_area()[area]]
    outcome = await try_attacks(course, target, calm_felt[0], pids, SHORT)
    assert all(outcome.rounds.values())
    assert not outcome.complaints(SHORT)
