"""Loads whose callers leave: they cost their team time once they are many, and nobody else."""

from __future__ import annotations

import pytest

from tests.unit.workers.planner.reports import NOW, catalog
from tests.unit.workers.planner.test_planner import Host, World
from workers.planner.given_up import FIRST_WAIT_S, FREE, LONGEST_WAIT_S, MAX_TEAMS, REMEMBERED_S, SOON_S, GivenUp
from workers.planner.messages import ToldFailure
from workers.protocol.residency import ModelDemand, Why

ROUND_S = 0.5
"""Seconds between two decisions of a `World`."""


class Swapped(World):
    """A machine with room for one of `x`, which the team `honest` uses, and `y`, which others call."""

    def __init__(self) -> None:
        super().__init__(Host(catalog(x=60, y=60)))
        self.num_left = 0
        """How often `x` left for `y`."""
        self.use_x()

    def waits(self, team: str, for_s: float = 0.1) -> ModelDemand:
        return ModelDemand(num_waiting=1, oldest_at=self.now + ROUND_S + 0.1 - for_s, teams=(team,))

    def use_x(self) -> None:
        """Have a call for `x` loaded and served."""
        while self.loaded != ["x"]:
            self.round(x=self.waits("honest"))
        self.round(x=ModelDemand(used_at=self.now + ROUND_S))

    def call_y(self, team: str, rounds: int = 1) -> float:
        """Have a caller wait for `y` for some decisions, or until its load begins, and leave. Return how long it
        waited for that; infinity: there was none."""
        found, was_there = float("inf"), "x" in self.loaded
        for number in range(rounds):
            self.round(y=self.waits(team, for_s=0.1 + number * ROUND_S))
            if "x" not in self.loaded:
                found = 0.1 + number * ROUND_S
                break
        self.num_left += was_there and "x" not in self.loaded
        self.round()
        return found

    @property
    def loaded(self) -> list[str]:
        return self.hosts["a"].models()


def test_callers_who_leave_again_and_again_have_no_models_change_places() -> None:
    """Each call of a tenth of a second had the other team's model leave, who then waited until it was loaded again."""
    world, began = Swapped(), NOW
    while world.now - began < REMEMBERED_S:
        world.call_y("hasty")
        world.use_x()
    assert world.num_left == FREE + 1


def test_who_stays_has_the_model_loaded_a_little_later_and_others_at_once() -> None:
    world = Swapped()
    for _ in range(FREE + 1):
        world.call_y("hasty")
        world.use_x()
    assert FIRST_WAIT_S <= world.call_y("hasty", rounds=4) <= FIRST_WAIT_S + 2 * ROUND_S
    world.use_x()
    assert world.call_y("other") < ROUND_S, "of another team"
    world.use_x()
    world.now, world.clock = world.now + REMEMBERED_S, world.clock + REMEMBERED_S
    world.use_x()
    assert world.call_y("hasty") < ROUND_S, "after a while it is forgotten"


def test_waits_double_up_to_a_bound() -> None:
    world = Swapped()
    found: list[float] = []
    for _ in range(8):
        found.append(world.call_y("hasty", rounds=20))
        world.use_x()
    assert found == sorted(found)
    assert LONGEST_WAIT_S <= found[-1] <= LONGEST_WAIT_S + ROUND_S


def test_loads_that_are_used_cost_nothing() -> None:
    world = Swapped()
    for _ in range(5):
        while world.loaded != ["y"]:
            world.round(y=world.waits("quick"))
        world.round(y=ModelDemand(used_at=world.now + ROUND_S))
        world.use_x()
    assert not world.planner._given_up.waits_s(world.now)


@pytest.mark.parametrize("why", ["it failed", "an admin unloaded it", "its time was over"])
def test_loads_that_others_ended_cost_nothing(why: str) -> None:
    world = Swapped()
    for _ in range(FREE + 2):
        rounds = int(SOON_S / ROUND_S) + 2 if why == "its time was over" else 1
        for number in range(rounds):
            world.round(y=world.waits("unlucky", for_s=0.1 + number * ROUND_S))
        if why == "it failed":
            failure = ToldFailure(not_before=world.now + 5.0, why=Why.of("it is damaged"))
            world.hosts["a"].more["failures"] = {"y": failure}
        world.planner.unloaded = frozenset({"y"} if why == "an admin unloaded it" else ())
        world.hosts["a"].workers = {id: one for id, one in world.hosts["a"].workers.items() if one.model != "y"}
        world.round()
        world.hosts["a"].more.pop("failures", None)
        world.planner.unloaded = frozenset()
        world.use_x()
    assert not world.planner._given_up.waits_s(world.now)


def test_what_is_remembered_is_bounded() -> None:
    given_up = GivenUp()
    for number in range(3 * MAX_TEAMS):
        given_up._note_given_up((f"team-{number // 2}",), NOW)
    assert len(given_up._given_up) == MAX_TEAMS
    assert f"team-{3 * MAX_TEAMS // 2 - 1}" in given_up.waits_s(NOW)
    given_up._note_given_up(("late",), NOW + 2 * REMEMBERED_S)
    assert [*given_up._given_up] == ["late"]
