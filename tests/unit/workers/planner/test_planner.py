"""One planner for several machines, asked as if they told it by Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.unit.workers.planner.reports import GIB, NOW, catalog, report, told
from workers.planner.hearing import UNSURE_S
from workers.planner.messages import MachineCatalog, MachineOrders, MachineReport, ToldFailure, ToldWorker, encode
from workers.planner.planner import Planner
from workers.protocol.residency import LIFE_S, ModelDemand, Why

WAITS = ModelDemand(num_waiting=1, oldest_at=NOW)


@dataclass(slots=True)
class Host:
    """A machine that carries out its orders at once."""

    catalog: MachineCatalog
    gib: float = 64
    skew_s: float = 0.0
    """By how much its clock is slow."""
    workers: dict[str, ToldWorker] = field(default_factory=dict)
    fence: int = 0
    done: int = 0
    is_there: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def report(self, now: float) -> MachineReport:
        more = {"catalog": "digest", "fence": self.fence, "done": self.done, **self.more}
        return report(now - self.skew_s, *self.workers.values(), gib=self.gib, **more)

    def follow(self, orders: MachineOrders, now: float) -> None:
        if orders.fence < self.fence:
            return
        if orders.fence > self.fence:
            self.fence, self.done = orders.fence, 0
        for start in orders.starts:
            if start.number > self.done:
                self.done = start.number
                since = now - self.skew_s
                self.workers[start.worker] = ToldWorker(
                    id=start.worker, model=start.model, shares=start.shares, status="ready", since=since
                )
        for worker in orders.leaving:
            self.workers.pop(worker, None)

    def models(self) -> list[str]:
        return sorted(worker.model for worker in self.workers.values())


class World:
    """Machines `a`, `b` ... of which the first one plans."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = dict(zip("abcdef", hosts, strict=False))
        self.now, self.clock = NOW, 10.0
        self.told: dict[bytes, bytes] = {}
        self.planner = self.elect("a", 1)

    def elect(self, name: str, fence: int, *, is_new_redis: bool = False) -> Planner:
        self.planner = Planner(name)
        self.planner.begin(fence, self.clock, is_new_redis=is_new_redis)
        return self.planner

    def round(self, *, is_heard: bool = True, **demand: ModelDemand) -> list[str] | None:
        """Let half a second pass; return who was ordered something, None where nothing was decided."""
        self.now, self.clock = self.now + 0.5, self.clock + 0.5
        for name, host in self.hosts.items():
            if host.is_there:
                self.told[name.encode()] = encode(host.report(self.now))
        own = self.hosts[self.planner.machine].report(self.now)
        self.planner.hear(own, self.told, {}, self.now + 0.1, self.clock)
        for name in self.planner.unknown_catalogs(self.clock):
            self.planner.learn(name, "digest", self.hosts[name].catalog)
        self.planner.learn(self.planner.machine, "digest", self.hosts[self.planner.machine].catalog)
        decision = self.planner.decide(demand, self.now + 0.1, self.clock)
        if decision is None:
            return None
        for name, orders in decision.orders.items():
            if is_heard and self.hosts[name].is_there:
                self.hosts[name].follow(orders, self.now)
        return [name for name, orders in decision.orders.items() if orders.starts or orders.leaving]

    def models(self) -> list[list[str]]:
        return [host.models() for host in self.hosts.values()]


def test_a_model_is_loaded_once_though_all_machines_have_it() -> None:
    world = World(Host(catalog(m=10)), Host(catalog(m=10)))
    for _ in range(4):
        world.round(m=WAITS)
    assert world.models() == [["m"], []]


def test_a_second_model_goes_to_the_machine_with_room() -> None:
    both = catalog(m=10, n=10)
    world = World(Host(both, gib=15), Host(both, gib=15))
    for _ in range(4):
        world.round(m=WAITS, n=WAITS)
    assert sorted(map(tuple, world.models())) == [("m",), ("n",)]


def test_each_machine_has_its_own_limit_of_models() -> None:
    world = World(Host(catalog(1, m=1, n=1, o=1)), Host(catalog(2, m=1, n=1, o=1)))
    for _ in range(4):
        world.round(m=WAITS, n=WAITS, o=WAITS)
    assert sorted(map(len, world.models())) == [1, 2]


def test_a_model_is_loaded_only_where_its_files_are_and_its_need_is_known() -> None:
    world = World(Host(catalog(n=10)), Host(catalog(m=None)), Host(catalog(m=10)))
    world.round(m=WAITS)
    assert world.models() == [[], [], ["m"]]


def test_what_a_worker_takes_can_differ_between_machines() -> None:
    world = World(Host(catalog(m=100), gib=60), Host(catalog(m=20), gib=30))
    world.round(m=WAITS)
    assert world.models() == [[], ["m"]]
    assert [share.bytes for worker in world.hosts["b"].workers.values() for share in worker.shares] == [20 * GIB]


def test_orders_that_get_lost_are_told_again() -> None:
    world = World(Host(catalog()), Host(catalog(m=10)))
    assert world.round(m=WAITS, is_heard=False) == ["b"]
    assert world.round(m=WAITS, is_heard=False) == ["b"]
    world.round(m=WAITS)
    assert world.models() == [[], ["m"]]
    assert world.round(m=WAITS) == []


def test_a_machine_that_vanishes_gives_its_models_to_others_and_surplus_ones_drain() -> None:
    world = World(Host(catalog()), Host(catalog(m=10)), Host(catalog(m=10)))
    world.round(m=WAITS)
    first = next(name for name, host in world.hosts.items() if host.models())
    world.hosts[first].is_there = False
    for _ in range(int(LIFE_S / 0.5) - 1):
        world.round(m=WAITS)
    assert sum(map(len, world.models())) == 1, "it may still be there"
    for _ in range(3):
        world.round(m=WAITS)
    assert sum(map(len, world.models())) == 2
    world.hosts[first].is_there = True
    for _ in range(3):
        world.round()
    assert sum(map(len, world.models())) == 1, "`max` counts over all machines"


def test_a_new_planner_takes_over_what_there_is() -> None:
    world = World(Host(catalog(m=10, n=10)), Host(catalog(m=10, n=10)))
    world.round(m=WAITS)
    before = world.models()
    world.elect("b", 2)
    world.round(m=WAITS)
    assert world.models() == before
    world.round(n=WAITS)
    assert sum(map(len, world.models())) == 2
    assert {host.fence for host in world.hosts.values()} == {2}


def test_orders_of_an_old_planner_are_not_followed() -> None:
    world = World(Host(catalog()), Host(catalog(m=10)))
    old = world.planner
    world.elect("a", 2)
    world.round()
    world.planner = old
    world.round(m=WAITS)
    assert world.models() == [[], []]
    assert old.highest_fence(world.clock) == 2, "by which it hears that it was deposed"


def test_where_redis_has_lost_all_a_planner_waits_until_others_have_told() -> None:
    other = told("b/1.1", "m")
    world = World(Host(catalog(m=10)), Host(catalog(m=10), workers={"b/1.1": other}))
    world.elect("a", 2, is_new_redis=True)
    world.hosts["b"].is_there = False
    assert world.round(m=WAITS) is None
    world.hosts["b"].is_there = True
    while world.round(m=WAITS) is None:
        assert world.clock < 10.0 + 2 * UNSURE_S
    assert world.models() == [[], ["m"]]


def test_clocks_may_differ() -> None:
    world = World(Host(catalog(m=10)), Host(catalog(m=10), skew_s=3600.0))
    assert world.round() is None, "it is not known whether the other one is alive"
    world.hosts["b"].workers["b/1.1"] = told("b/1.1", "m", since=NOW - 3600.0, last_used=NOW - 3600.0)
    assert world.round() == []
    decision = world.planner.decide({}, world.now, world.clock)
    assert decision is not None
    (worker,) = decision.picture.workers
    assert abs(worker.since - NOW) < 1.0
    assert len(decision.picture.machines) == 2


def test_a_failure_keeps_a_model_from_one_machine_only() -> None:
    failed = {"m": ToldFailure(not_before=NOW + 60, why=Why.of("SIGKILL"))}
    world = World(Host(catalog(m=10), more={"failures": failed}), Host(catalog(m=10)))
    world.round(m=WAITS)
    assert world.models() == [[], ["m"]]


def test_a_machine_that_ends_gets_nothing_more_and_what_it_has_leaves() -> None:
    world = World(Host(catalog(m=10)), Host(catalog(m=10)))
    world.round(m=WAITS)
    world.hosts["a"].more["is_leaving"] = True
    for _ in range(3):
        world.round(m=WAITS)
    assert world.models() == [[], ["m"]]


def test_a_catalog_that_is_not_known_yet_costs_no_worker() -> None:
    world = World(Host(catalog()), Host(catalog(m=10), workers={"b/1.1": told("b/1.1", "m")}))
    planner = world.planner
    planner.hear(world.hosts["a"].report(NOW), {b"b": encode(world.hosts["b"].report(NOW))}, {}, NOW, 10.0)
    assert planner.unknown_catalogs(10.0) == ["b"]
    decision = planner.decide({}, NOW, 10.0)
    assert decision is not None
    assert decision.plan.is_idle
    assert msgspec.json.decode(encode(decision.orders["b"]), type=MachineOrders).leaving == {}


def test_machines_hear_which_models_no_call_would_load() -> None:
    world = World(Host(catalog(m=100, n=10)), Host(catalog(m=100)))
    world.round()
    decision = world.planner.decide({}, world.now, world.clock)
    assert decision is not None
    told = {name: {model: wait.reason for model, wait in one.waits.items()} for name, one in decision.orders.items()}
    assert told == {"a": {"m": "too_large"}, "b": {"m": "too_large"}}


def test_teams_take_turns_however_many_models_one_of_them_calls() -> None:
    """A team that calls three models, one after the other, gets every other turn, not three of four."""
    world = World(Host(catalog(a=60, b=60, c=60, d=60)))
    since = dict.fromkeys("abcd", NOW)
    turns: list[str] = []
    for _ in range(2000):
        loaded = world.hosts["a"].models()
        if loaded and loaded != turns[-1:]:
            turns += loaded
        for name in loaded:  # its calls are served, and new ones come
            since[name] = world.now
        waiting = {
            name: ModelDemand(
                num_waiting=1, oldest_at=since[name], teams=("quiet",) if name == "a" else ("noisy",), used_at=0.0
            )
            for name in "abcd"
            if name not in loaded
        }
        world.round(is_heard=True, **waiting)
    assert len(turns) > 20
    assert turns[2:20:2].count("a") + turns[3:20:2].count("a") in (8, 9), turns[:20]
    assert {*turns} == {*"abcd"}, "and the other's models take turns among themselves"


def test_a_team_that_always_has_models_overdue_does_not_keep_anothers_from_being_loaded() -> None:
    """A thousand calls of one team wait for ten models, of which one fits at a time, each for a minute. The other
    team's first call had its model loaded when it was overdue itself, 30 s later."""
    names = "abcdefghij"
    world = World(Host(catalog(**dict.fromkeys(names, 60), z=60)))
    called_at = 0.0
    for number in range(100):
        loaded = world.hosts["a"].models()
        waiting = {
            name: ModelDemand(num_waiting=100, oldest_at=world.now - 60, teams=("noisy",))
            for name in names
            if name not in loaded
        }
        if number >= 60:
            called_at = called_at or world.now
            waiting["z"] = ModelDemand(num_waiting=1, oldest_at=called_at, teams=("quiet",))
        world.round(is_heard=True, **waiting)
        if "z" in world.hosts["a"].models():
            break
    assert world.hosts["a"].models() == ["z"]
    assert world.now - called_at < 3.0, "the next turn is its own"
