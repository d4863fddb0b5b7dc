"""Every attack beside a caller of another team, an area's one after the other.

The caller streams on from one attack of an area to the next, so that it feels what an attack leaves behind as well.
The machine is shared with other tests here, so this bounds seconds where an attack took tens of them; the figures that
the project promises are measured by `python -m tests.security` on a quiet machine, which `make test-full` runs.
"""

from __future__ import annotations

import pytest

from tests.security.attack import Fleet
from tests.security.attacks import attacks_by_area
from tests.security.fleet import attacked_fleet
from tests.security.trial import Bounds, try_attacks, undisturbed

SHORT = Bounds(added_gap_s=1.0, ttft_factor=4.0, ttft_noise_s=2.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [Fleet.PLAIN, *(pytest.param(kind, marks=pytest.mark.serial) for kind in (Fleet.WIDE, Fleet.ENCRYPTED))],
    ids=["demo", "wide", "encrypted"],
)
async def test_an_area_takes_nothing_from_others(kind: Fleet) -> None:
    with attacked_fleet(kind) as (target, pids):
        calm = await undisturbed(target)
        assert calm.num_streams
        assert not calm.errors
        for area, attacks in attacks_by_area().items():
            course = [(attack, attack.short_s) for attack in attacks if attack.fleet is kind]
            if not course:
                continue
            outcome = await try_attacks(course, target, calm, pids, SHORT)
            assert all(outcome.rounds.values()), area
            assert not outcome.complaints(SHORT), area
