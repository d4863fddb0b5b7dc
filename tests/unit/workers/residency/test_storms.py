"""Simulated fleets under storms of calls: nobody waits for ever, memory is never overdrawn, policies hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.residency.simulator import GIB, Call, Figures, Simulator, Times
from tests.unit.workers.residency.pictures import machine
from workers.residency.decide import decide
from workers.residency.picture import Bounds, Machine, Model, Need
from workers.residency.plan import Release, Reserve, Start, Stop
from workers.residency.policy import Group, Residency, resolve

BOUNDS = Bounds(patience_s=20, quiet_s=3)
SERVICE_S = 3.0
MANY_SLOTS = 1_000


class Checked(Simulator):
    """A simulator that also checks that policies hold, at each moment at which something is decided."""

    def check(self) -> None:
        super().check()
        for name, model in self.models.items():
            assert self.num_usable(name) <= model.policy.most, f"{name} above max at {self.now}"
        for machine_id in self.machines:
            self._check_groups({each.model for each in self.processes.values() if each.machine == machine_id})
        for time, actions in itertools.groupby(self.figures.actions[-50:], key=lambda pair: pair[0]):
            self._check_no_contradiction(time, [action for _, action in actions])

    def num_usable(self, name: str) -> int:
        return sum(
            each.model == name and not each.stops and each.status in ("loading", "ready")
            for each in self.processes.values()
        )

    def _check_groups(self, there: set[str]) -> None:
        assert not self.models_max or len(there) <= self.models_max, f"{there} at {self.now}"
        for name, group in self.groups.items():
            members = {model for model in there if self.models[model].policy.group == name}
            others = {model for model in there - members if not self.models[model].policy.stays}
            assert not group.at_once or len(members) <= group.at_once, f"{members} at {self.now}"
            assert not (group.exclusive and members and others), f"{members} beside {others} at {self.now}"

    def _check_no_contradiction(self, time: float, actions: list[Any]) -> None:
        reserved = {action.worker for action in actions if isinstance(action, Reserve)}
        released = {action.worker for action in actions if isinstance(action, Release)}
        started = {action.model for action in actions if isinstance(action, Start)}
        gave_way = {action.model for action in actions if isinstance(action, Stop) and action.wanted_by}
        assert not reserved & released, f"reserved and released at {time}: {reserved & released}"
        single = {name for name in started & gave_way if self.models[name].policy.most == 1}
        assert not single, f"started and stopped at {time}: {single}"
        for action in actions:
            if isinstance(action, Stop | Reserve) and action.wanted_by:
                assert not self.models[action.model].policy.pinned, f"{action} at {time}"


@dataclass(frozen=True)
class Fleet:
    machines: list[Machine]
    models: list[Model]
    times: dict[str, Times]
    calls: list[Call]
    groups: dict[str, Group]
    models_max: int
    tells: bool

    def run(self) -> tuple[Figures, Checked]:
        simulator = Checked(
            decide,
            self.machines,
            self.models,
            self.times,
            bounds=BOUNDS,
            groups=self.groups,
            models_max=self.models_max,
            tells=self.tells,
        )
        return simulator.run(self.calls, end_s=100_000), simulator

    @property
    def bound_s(self) -> float:
        """How long a call may wait at most: patience, and a turn of each model before it."""
        turns = [
            max(model.policy.stay_s(0.0), BOUNDS.patience_s if model.policy.priority else 0)
            + self.times[model.name].load_s
            + self.times[model.name].unload_s
            + SERVICE_S
            for model in self.models
        ]
        return BOUNDS.patience_s + sum(turns)


def need(size: float, on_gpu: bool) -> Need:
    return Need(int(size * GIB), host_bytes=GIB) if on_gpu else Need(cpu_bytes=int(size * GIB))


NAMES = "abcdef"


@st.composite
def fleets(draw: st.DrawFn, *, is_plain: bool) -> Fleet:
    """Return a fleet where each model fits on some machine. `is_plain`: nothing stays, so that all are served."""
    on_gpu = draw(st.booleans())
    gpus = tuple(draw(st.lists(st.sampled_from((12, 24)), min_size=1, max_size=3))) if on_gpu else ()
    machines = [machine(f"host{number}", gpus, host=64 if on_gpu else 24) for number in range(draw(st.integers(1, 2)))]
    largest = sum(gpus) if on_gpu else 24
    names = NAMES[: draw(st.integers(2, 6))]
    groups = draw(
        st.sampled_from(
            [{}, {"g": Group(at_once=1)}, {"g": Group(exclusive=True)}, {"g": Group(at_once=1, exclusive=True)}]
        )
    )
    models = []
    for name in names:
        size = draw(st.sampled_from([each for each in (3, 7, 11, 20, 23, 30) if each <= largest]))
        policy: dict[str, Any] = {
            "priority": draw(st.sampled_from((0, 0, 3))),
            "min_resident_s": draw(st.sampled_from((0, 5, 10))),
            "ttl_s": draw(st.sampled_from((0, 8))),
            "max": draw(st.sampled_from((1, 1, 2))),
            "group": draw(st.sampled_from((None, *groups))),
        }
        if not is_plain:
            may_pin = not policy["ttl_s"] and policy["group"] is None
            policy["pinned"] = may_pin and draw(st.sampled_from((False, False, True)))
            policy["min"] = draw(st.sampled_from((0, 0, 1))) if policy["group"] is None else 0
            policy["preload"] = draw(st.booleans())
        models.append(Model(name, resolve(Residency(**policy), 1), need(size, on_gpu)))
    times = {
        name: Times(
            load_s=draw(st.sampled_from((0.5, 4, 15))),
            unload_s=draw(st.sampled_from((0, 1, 6))),
            real_part=draw(st.sampled_from((0.6, 1.0))),
            slots=MANY_SLOTS,
        )
        for name in names
    }
    waits = st.just(float("inf")) if is_plain else st.sampled_from((float("inf"), 5.0, 25.0))
    calls = draw(
        st.lists(
            st.builds(
                Call,
                st.integers(0, 240).map(lambda half: half / 2),
                st.sampled_from(names),
                st.sampled_from((0.5, SERVICE_S)),
                waits,
            ),
            min_size=1,
            max_size=60,
        )
    )
    return Fleet(machines, models, times, calls, groups, draw(st.sampled_from((0, 0, 1, 2))), draw(st.booleans()))


MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(fleets(is_plain=True))
def test_every_call_is_answered_within_the_bound(fleet: Fleet) -> None:
    figures, simulator = fleet.run()
    assert len(figures.all_waits_s()) == len(fleet.calls), simulator.plan
    assert figures.all_waits_s()[-1] <= fleet.bound_s


@MANY
@given(fleets(is_plain=False))
def test_policies_hold_whoever_calls_and_leaves(fleet: Fleet) -> None:
    """Models may stay for ever here, so that others are never served; then the plan says so."""
    figures, simulator = fleet.run()
    waiting = {name for name, calls in simulator.waiting.items() if calls}
    assert len(figures.all_waits_s()) + figures.num_left + sum(map(len, simulator.waiting.values())) == len(fleet.calls)
    told = {wait.model: wait.reason for wait in simulator.plan.waits()}
    assert {told.get(name) for name in waiting} <= {"no_room"}
    for name, model in simulator.models.items():
        if simulator.num_usable(name) < model.policy.min:
            assert told.get(name) == "no_room"


@settings(MANY, max_examples=25)
@given(fleets(is_plain=False))
def test_the_same_calls_lead_to_the_same_actions(fleet: Fleet) -> None:
    assert fleet.run()[0].actions == fleet.run()[0].actions


def storm(pattern: str, gap_s: float, seconds: float, service_s: float = SERVICE_S) -> list[Call]:
    times = (number * gap_s for number in range(int(seconds / gap_s)))
    return [Call(at, name, service_s) for at, name in zip(times, itertools.cycle(pattern), strict=False)]


def run(calls: Iterable[Call], sizes: dict[str, float], **more: Any) -> tuple[Figures, Checked]:
    models = [Model(name, resolve(Residency(), 1), need(size, on_gpu=True)) for name, size in sizes.items()]
    times = {name: Times(slots=MANY_SLOTS) for name in sizes}
    simulator = Checked(decide, [machine()], models, times, **{"bounds": BOUNDS, **more})
    return simulator.run(calls), simulator


@pytest.mark.parametrize("pattern", ["abaac", "aab", "abc", "aaaaaaaaac", "aabbcc"])
@pytest.mark.parametrize("gap_s", [0.2, 1.0, 3.0])
def test_a_storm_starves_nobody(pattern: str, gap_s: float) -> None:
    """`a` is called again and again, so that it never is without calls; each of them fills the machine alone."""
    figures, _ = run(storm(pattern, gap_s, 300), {"a": 20, "b": 20, "c": 20})
    assert figures.all_waits_s()[-1] <= BOUNDS.patience_s + 2 * (10 + SERVICE_S + 4.5)
    assert len(figures.all_waits_s()) == int(300 / gap_s)


def test_agents_do_not_make_models_load_for_each_call() -> None:
    """Ten agents that ask `a`, `b`, `a`, `a`, `c` in turn, all of which do not fit: the loads are fewer by far."""
    figures, _ = run(storm("abaac", 0.5, 600, 1.0), {"a": 11, "b": 11, "c": 11})
    assert figures.num_loads <= 600 / 5
    assert figures.num_loads >= 3


def test_a_large_model_is_not_passed_by_small_ones_for_ever() -> None:
    """Small models come and go, so that there never is room for the large one by itself."""
    calls = [*storm("abcdef", 0.5, 200), Call(10, "z", SERVICE_S)]
    figures, _ = run(calls, {**dict.fromkeys("abcdef", 6.0), "z": 23.0})
    assert figures.waits_s["z"][0] <= BOUNDS.patience_s + 10 + SERVICE_S + 4.5 + 1


def test_a_waiter_whose_model_leaves_is_not_forgotten() -> None:
    """A call for `a` comes in the moment in which `a` leaves for `b`; it loads again after `b` had its turn."""
    calls = [Call(0, "a", 1), Call(20, "b", 1), Call(20.1, "a", 1)]
    figures, simulator = run(calls, {"a": 20, "b": 20})
    assert [action.model for _, action in figures.actions if isinstance(action, Start)] == ["a", "b", "a"]
    assert not any(simulator.waiting.values())


def test_callers_who_leave_give_the_place_back() -> None:
    """`b` has a place reserved for its only call, whose caller leaves before it is free: `a` goes on without a load."""
    calls = [Call(0, "a", 100), Call(1, "b", 1, leaves_after_s=40), Call(50, "a", 1)]
    figures, _ = run(calls, {"a": 20, "b": 20})
    kinds = [type(action).__name__ for _, action in figures.actions]
    assert kinds == ["Start", "Reserve", "Release"]
    assert figures.waits_s["a"] == [4.0, 0.0]


def test_a_slow_unload_is_waited_for() -> None:
    models = [Model(name, resolve(Residency(), 1), need(20, on_gpu=True)) for name in "ab"]
    times = {"a": Times(unload_s=50), "b": Times()}
    simulator = Checked(decide, [machine()], models, times, bounds=BOUNDS)
    figures = simulator.run([Call(0, "a", 1), Call(20, "b", 1)])
    assert figures.waits_s["b"] == [54.0]


def test_demand_beyond_one_worker_brings_more() -> None:
    """One worker of four slots can't follow; a second one loads beside it and leaves by its ttl."""
    policy = resolve(Residency(max=2, ttl_s=30), 1)
    models = [Model("a", policy, need(10, on_gpu=True))]
    simulator = Checked(decide, [machine()], models, {"a": Times(slots=4)}, bounds=replace(BOUNDS, grow_wait_s=5))
    figures = simulator.run(storm("a", 0.4, 120))
    assert figures.num_loads == 2
    assert not simulator.processes, "both left by their ttl"
    assert figures.all_waits_s()[-1] < 40
