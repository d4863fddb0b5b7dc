"""Every attack, for a few seconds beside a caller of another team; for a minute each in `make test-full`.

The machine is shared with other tests here, so the short form bounds seconds where an attack took tens of them; the
figures that the project promises are measured by `python -m tests.security` on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.attack import Attack, Target
from tests.security.attacks import all_attacks
from tests.security.fleet import attacked_fleet
from tests.security.trial import Bounds, try_attack, undisturbed
from tests.security.victim import Felt

SHORT_S, LONG_S = 3.0, 60.0
SHORT = Bounds(added_gap_s=1.0, ttft_factor=4.0, ttft_noise_s=2.0)
LONG = Bounds(added_gap_s=0.3, ttft_factor=2.0, ttft_noise_s=0.2, rest_s=60.0)


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Target, dict[str, int]]]:
    with attacked_fleet() as started:
        yield started


@pytest.fixture(scope="module")
def calm_felt() -> list[Felt]:
    """What the victim felt undisturbed, measured once."""
    return []


async def _held(
    attack: Attack, fleet: tuple[Target, dict[str, int]], calm_felt: list[Felt], seconds: float, bounds: Bounds
) -> None:
    target, pids = fleet
    if not calm_felt:
        calm_felt.append(await undisturbed(target))
        assert calm_felt[0].num_streams
        assert not calm_felt[0].errors
    outcome = await try_attack(attack, target, seconds, calm_felt[0], pids, bounds)
    assert outcome.rounds
    assert not outcome.complaints(bounds)


@pytest.mark.parametrize("attack", all_attacks(), ids=lambda attack: attack.name)
async def test_takes_nothing_from_others(
    attack: Attack, fleet: tuple[Target, dict[str, int]], calm_felt: list[Felt]
) -> None:
    await _held(attack, fleet, calm_felt, SHORT_S, SHORT)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attack", all_attacks(), ids=lambda attack: attack.name)
async def test_takes_nothing_from_others_for_a_minute(
    attack: Attack, fleet: tuple[Target, dict[str, int]], calm_felt: list[Felt]
) -> None:
    await _held(attack, fleet, calm_felt, LONG_S, LONG)
