"""Who runs what once the catalog is another: those whose model is as it was go on untouched. Pure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from workers.models.catalog import CatalogError
from workers.models.spec import AdapterSpec, LlamaSettings, ModelSpec
from workers.residency.policy import Residency
from workers.supervisor.plan import PlannedWorker, Site, plan, replan

BIG = ModelSpec(name="big", path="/m/big.gguf", workers=2)
SMALL = ModelSpec(name="small", path="/m/small.gguf", workers=1)
NEW = ModelSpec(name="new", path="/m/new.gguf", workers=1)


def planned(*models: ModelSpec, devices: tuple[str, ...] = ()) -> tuple[PlannedWorker, ...]:
    return plan(models, 8, devices, "h")


def again(
    current: tuple[PlannedWorker, ...], *models: ModelSpec, devices: tuple[str, ...] = (), taken: tuple[str, ...] = ()
) -> tuple[PlannedWorker, ...]:
    return replan(current, models, Site(8, devices, "h"), taken)


def shape(workers: tuple[PlannedWorker, ...]) -> list[tuple[str, str, str | None]]:
    return [(worker.name, worker.model.name, worker.device) for worker in workers]


def test_nothing_new_changes_nothing() -> None:
    first = planned(BIG, SMALL, devices=("0", "1"))
    assert again(first, BIG, SMALL, devices=("0", "1")) == first
    other = again(first, SMALL, BIG, devices=("0", "1"))
    assert sorted(other, key=lambda worker: worker.name) == list(first), "nor does another order"


def test_an_added_model_gets_workers_beside_the_others() -> None:
    first = planned(BIG, SMALL)
    now = again(first, NEW, BIG, SMALL)
    assert now[1:] == first, "with their threads, of which there were more for each"
    added = now[0]
    assert (added.name, added.worker_id, added.model.name) == ("worker-3", "h-3", "new")
    assert (added.model.llama.n_threads, added.neighbours) == (2, 4)


def test_a_removed_model_gives_its_name_to_nobody() -> None:
    first = planned(BIG, SMALL)
    now = again(first, SMALL, NEW)
    assert shape(now) == [("worker-2", "small", None), ("worker-3", "new", None)]
    assert again(now, SMALL) == now[:1]
    other = again(now[:1], SMALL, NEW, taken=("worker-0", "worker-2"))
    assert other[1].name == "worker-1", "worker-0 still drains"


def test_a_changed_model_keeps_its_places() -> None:
    first = planned(BIG, SMALL, devices=("0", "1"))
    changed = replace(BIG, slots=3)
    now = again(first, changed, SMALL, devices=("0", "1"))
    assert shape(now) == shape(first)
    assert [worker.model.slots for worker in now] == [3, 3, 8]
    assert now[2] is first[2]
    wider = again(first, replace(BIG, gpus=2), SMALL, devices=("0", "1"))
    assert {worker.device for worker in wider[:2]} == {"0,1", "1,0"} or all(worker.device for worker in wider)


def test_more_or_fewer_workers_leave_the_rest_alone() -> None:
    first = planned(BIG, SMALL)
    assert again(first, replace(BIG, workers=1), SMALL) == (first[0], first[2])
    more = again(first, replace(BIG, workers=3), SMALL)
    assert (more[0], more[1], more[3]) == first
    shared = replace(BIG, llama=LlamaSettings(cpus="0-3"))
    first = planned(shared)
    now = again(first, replace(shared, workers=1))
    assert [worker.model.llama.cpus for worker in now] == ["0-3"], "they had two of these cores each"


def test_what_no_worker_reads_replaces_none() -> None:
    tuned = replace(SMALL, adapters=(AdapterSpec(name="polite", path="/m/polite.gguf"),))
    first = planned(tuned)
    scaled = tuple(replace(adapter, scale=0.5) for adapter in tuned.adapters)
    assert again(first, replace(tuned, tags=("quick",), residency=Residency(ttl_s=60), adapters=scaled)) == first


def test_a_new_worker_gets_the_device_with_the_fewest() -> None:
    devices = ("0", "1", "2")
    first = planned(BIG, devices=devices)
    assert shape(again(first, BIG, NEW, devices=devices))[-1] == ("worker-2", "new", "2")


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(CatalogError, match="wants 3 GPUs and this machine has 1"):
        again(planned(SMALL, devices=("0",)), replace(NEW, gpus=3), devices=("0",))
