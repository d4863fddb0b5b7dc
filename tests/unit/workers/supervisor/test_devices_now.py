"""What a supervisor that loads models on demand takes a machine's memories for, as readings change and fail."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from workers.footprint.devices import HOST, DeviceState
from workers.footprint.learned import Learned
from workers.footprint.predict import Bounds
from workers.residency.picture import CPU, Device
from workers.supervisor.needs import Needs
from workers.supervisor.output import Console
from workers.supervisor.plan import Site
from workers.supervisor.residents import Residents, Rules

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


def devices_of(residents: Residents) -> dict[str, Device]:
    return {device.id: device for device in map(residents._device, residents._devices_now())}


def residents_of(readings: Readings, folder: Path) -> Residents:
    needs = Needs(Learned(folder / "learned.json"), Bounds(), AT_START, cores=1)
    return Residents((), Rules(), Site(1, (), "host"), needs, [readings], Console("info", print), 120.0)


def test_memory_that_a_dead_supervisors_workers_still_held_is_not_others_for_ever(tmp_path: Path) -> None:
    """Or what any program held that ran when the supervisor was started: its models would have too little for good."""
    readings = Readings()
    residents = residents_of(readings, tmp_path)
    assert devices_of(residents)["gpu"].other_bytes > 70 << 30
    readings.states = tuple(replace(state, free=99 << 30) for state in AT_START)
    assert all(device.other_bytes < 4 << 30 for device in devices_of(residents).values())


def test_a_device_that_can_not_be_read_just_now_is_not_gone(tmp_path: Path) -> None:
    """Else who waits for a model is told that it is too large for this machine, whatever is sent again."""
    readings = Readings()
    residents = residents_of(readings, tmp_path)
    for left in (AT_START[:1], AT_START[1:], ()):
        readings.states = left
        found = devices_of(residents)
        assert set(found) == {"gpu", CPU}
        assert [found[state.id].is_trusted for state in AT_START] == [state in left for state in AT_START]
        assert all(device.total_bytes == TOTAL for device in found.values())
