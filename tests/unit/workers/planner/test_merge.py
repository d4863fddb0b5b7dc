"""What machines and gateways tell, as one picture."""

from __future__ import annotations

from tests.unit.workers.planner.reports import GIB, NOW, catalog, report, told
from workers.planner.merge import MachineView, all_demand, describe, merge, worker_of
from workers.planner.messages import MachineCatalog, ToldModel, ToldWorker
from workers.protocol.residency import ModelDemand
from workers.residency.picture import Need, Picture
from workers.residency.policy import Group, Residency


def view(*workers: ToldWorker, lag_s: float = 0.0) -> MachineView:
    return MachineView(report(NOW, *workers), lag_s, tuple(worker_of(each, "", lag_s) for each in workers), catalog())


def merged(*views: MachineView, **demand: ModelDemand) -> Picture:
    described = describe({"a": catalog(m=10)}, "a")
    return merge(dict(zip("abc", views, strict=False)), described, demand, {}, frozenset(), NOW)


def test_rules_of_the_planners_catalog_count_where_catalogs_differ() -> None:
    catalogs = {
        name: MachineCatalog(
            models={"m": ToldModel(policy=Residency(max=most), need=Need(cpu_bytes=most * GIB))},
            groups={"g": Group(at_once=most)},
        )
        for name, most in (("a", 1), ("b", 2))
    }
    for planner, most in (("a", 1), ("b", 2)):
        found = describe(catalogs, planner)
        assert found.models["m"].policy.max == most
        assert found.groups["g"].at_once == most
        assert found.models["m"].machines == {"a", "b"}


def test_a_model_of_which_no_machine_knows_the_need_is_only_a_name() -> None:
    found = describe({"a": catalog(m=None), "b": catalog(n=1)}, "a")
    assert found.names == {"m", "n"}
    assert [*found.models] == ["n"]


def test_a_models_only_worker_has_all_of_its_calls_and_of_several_the_last_one_is_in_use() -> None:
    calls = ModelDemand(num_running=2, used_at=NOW - 1)
    (one,) = merged(view(told("w", "m")), m=calls).workers
    assert (one.num_running, one.last_used) == (2, NOW)
    two = merged(view(told("w", "m")), view(told("v", "m", num_running=1)), m=calls).workers
    assert sorted((worker.num_running, worker.last_used) for worker in two) == [(0, NOW - 100), (1, NOW)]


def test_nothing_loads_where_only_the_need_of_earlier_settings_is_known() -> None:
    """Workers with these settings run on, and count."""
    old = ToldModel(policy=Residency(max=1), need=Need(cpu_bytes=GIB), is_outdated=True)
    new = ToldModel(policy=Residency(max=1), need=Need(cpu_bytes=2 * GIB))
    catalogs = {"a": MachineCatalog(models={"m": old}), "b": MachineCatalog(models={"m": new})}
    found = describe(catalogs, "a").models["m"]
    assert found.machines == {"b"}
    assert {"a": found.need, **found.needs} == {"a": old.need, "b": new.need}


def test_a_stale_worker_and_its_successor_are_told() -> None:
    workers = (told("w", "m", status="reserved", is_stale=True, is_settling=True), told("v", "m", replaces="w"))
    stale, successor = merged(view(*workers)).workers
    assert (stale.is_stale, stale.is_busy, successor.replaces) == (True, True, "w")


def test_a_model_was_loaded_and_left_wherever_that_was() -> None:
    views = {
        "a": MachineView(report(loaded=("m",), left={"m": NOW - 9}), 0.0, (), None),
        "b": MachineView(report(left={"m": NOW - 60}), 55.0, (), None),
    }
    (model,) = merge(views, describe({"a": catalog(m=1)}, "a"), {}, {}, frozenset(), NOW).models
    assert model.was_loaded
    assert model.left_at == NOW - 5


def test_the_calls_of_all_gateways_count_by_one_clock() -> None:
    slow = ModelDemand(num_waiting=1, oldest_at=NOW - 110, used_at=NOW - 101)
    right = ModelDemand(num_waiting=2, oldest_at=NOW - 5, predicted_wait_s=3.0, num_running=1)
    found = all_demand([({"m": slow}, 100.0), ({"m": right}, 0.0)])["m"]
    assert (found.num_waiting, found.oldest_at, found.used_at) == (3, NOW - 10, NOW - 1)
    assert (found.predicted_wait_s, found.num_running) == (3.0, 1)


def test_an_admins_wish_is_demand() -> None:
    described = describe({"a": catalog(m=1)}, "a")
    picture = merge({"a": view()}, described, {}, {"m": NOW - 1, "other": NOW}, frozenset({"m", "x"}), NOW)
    (demand,) = picture.demand
    assert (demand.model, demand.is_asked_by_admin, demand.oldest_since) == ("m", True, NOW - 1)
    assert picture.unloaded == {"m"}
