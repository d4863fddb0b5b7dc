"""What a supervisor that loads models on demand takes a machine's memories for, as readings change and fail."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from workers.footprint.devices import HOST, DeviceState
from workers.footprint.footprint import Footprint, Share
from workers.footprint.learned import Learned
from workers.footprint.predict import Bounds
from workers.models.spec import ModelSpec
from workers.planner.messages import StartOrder
from workers.protocol.residency import Why
from workers.residency.picture import CPU, Device, Need
from workers.residency.picture import Share as PlannedShare
from workers.supervisor.loading.inventory import Inventory
from workers.supervisor.loading.keepers import Keepers
from workers.supervisor.loading.sleepers import Sleepers
from workers.supervisor.needs import Needs, Prediction

TOTAL = 100 << 30
AT_START = (DeviceState("gpu", "gpu", TOTAL, 30 << 30), DeviceState(HOST, "cpu", TOTAL, 20 << 30))


class Readings:
    """The memories of a machine, as its drivers tell them."""

    def __init__(self) -> None:
        self.states: tuple[DeviceState, ...] = AT_START

    def devices(self) -> tuple[DeviceState, ...]:
        return self.states

    def taken(self, pids: Collection[int]) -> Mapping[str, int]:
        return {}


def devices_of(inventory: Inventory) -> dict[str, Device]:
    inventory.read_devices(0)
    return {device.id: device for device in inventory.devices}


def inventory_of(readings: Readings, folder: Path) -> Inventory:
    needs = Needs(Learned(folder / "learned.json"), Bounds(), AT_START, cores=1)
    return Inventory("host", needs, [readings])


def test_memory_that_a_dead_supervisors_workers_still_held_is_not_others_for_ever(tmp_path: Path) -> None:
    """Or what any program held that ran when the supervisor was started: its models would have too little for good."""
    readings = Readings()
    inventory = inventory_of(readings, tmp_path)
    assert devices_of(inventory)["gpu"].other_bytes > 70 << 30
    readings.states = tuple(replace(state, free=99 << 30) for state in AT_START)
    assert all(device.other_bytes < 4 << 30 for device in devices_of(inventory).values())


def test_a_device_that_can_not_be_read_just_now_is_not_gone(tmp_path: Path) -> None:
    """Else who waits for a model is told that it is too large for this machine, whatever is sent again."""
    readings = Readings()
    inventory = inventory_of(readings, tmp_path)
    for left in (AT_START[:1], AT_START[1:], ()):
        readings.states = left
        found = devices_of(inventory)
        assert set(found) == {"gpu", CPU}
        assert [found[state.id].is_trusted for state in AT_START] == [state in left for state in AT_START]
        assert all(device.total_bytes == TOTAL for device in found.values())


def test_sleeping_models_leave_for_whoever_needs_their_memory(tmp_path: Path) -> None:
    """First the one that has slept longest; their memory counts as free, and nothing starts before it is."""
    weights, readings = tmp_path / "weights.gguf", Readings()
    weights.write_bytes(bytes(1 << 20))
    inventory = inventory_of(readings, tmp_path)
    keepers = Keepers(print)
    sleepers = Sleepers(inventory, keepers, print)
    inventory.models = {name: ModelSpec(name=name) for name in ("a", "b", "c")}
    spec, footprint = ModelSpec(name="c"), Footprint(host=Share())
    inventory.needs.found["c"] = Prediction(spec, spec, Need(cpu_bytes=11 << 30), footprint, "", "")

    def start(gib: int) -> StartOrder:
        return StartOrder(number=1, worker="1", model="c", shares=(PlannedShare(CPU, gib << 30),), why=Why())

    def look(free_gib: int) -> None:
        readings.states = (AT_START[0], replace(AT_START[1], free=free_gib << 30))
        keepers.look()
        inventory.read_devices(keepers.locked_bytes)

    def settle() -> None:
        deadline = time.monotonic() + 20
        while keepers.is_ending or keepers.is_reading:
            assert time.monotonic() < deadline
            keepers.look()
            time.sleep(0.01)

    try:
        for model in ("a", "b"):
            keepers.start(model, [weights], 4 << 30, is_shared=True)
        settle()
        look(20)
        assert not sleepers.makes_room(start(9)), "there is room beside them"
        assert [*keepers.models] == ["a", "b"]
        assert sleepers.makes_room(start(11)), "one has to leave"
        assert [*keepers.models] == ["b"]
        settle()
        look(20)
        assert not sleepers.makes_room(start(11))
        assert (inventory.free_of(CPU) or 0) >= 11 << 30
        look(3)
        sleepers.tend()
        assert not [*keepers.models], "others took the memory"
    finally:
        keepers.close()
