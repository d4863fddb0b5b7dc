"""Holds what a supervisor knows of its machine: the models that it loads on demand, their workers, and the memories.

Times are unix seconds by this machine's clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workers.footprint.devices import HOST, DeviceProvider, DeviceState
from workers.models.catalog import Catalog
from workers.models.spec import ModelSpec
from workers.planner.merge import worker_of
from workers.planner.messages import ToldWorker
from workers.residency.ledger import free_bytes
from workers.residency.picture import CPU, NEVER, Device, Share
from workers.residency.policy import Group
from workers.supervisor.loading.history import History
from workers.supervisor.loading.resident import Resident
from workers.supervisor.needs import Needs
from workers.supervisor.plan import is_served_alike

RESERVE_SHARE = 0.02
"""Share of a device that is left to others."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The fields of the catalog that concern all of its models together."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    models_max: int = 0

    @classmethod
    def of(cls, found: Catalog) -> Rules:
        return cls(found.groups, found.models_max)


class Inventory:
    """The models, workers and memories of one machine."""

    def __init__(self, host: str, needs: Needs, providers: Sequence[DeviceProvider]) -> None:
        """`host`: the machine's name."""
        self.needs = needs
        self.models: dict[str, ModelSpec] = {}
        self.rules = Rules()
        self.past: dict[str, History] = {}
        self.residents: dict[str, Resident] = {}
        """Worker's name -> the worker, until its process is gone."""
        self.devices: tuple[Device, ...] = ()
        """The memories as they were last read."""
        self._host = host
        self._providers = providers
        self._others = {device.id: _others(device) for device in needs.devices}

    def past_of(self, model: str) -> History:
        """Return what became of a model's workers."""
        return self.past.setdefault(model, History(model))

    def of_model(self, model: str) -> list[Resident]:
        """Return a model's workers."""
        return [each for each in self.residents.values() if each.model == model]

    def read_devices(self, locked_bytes: int) -> None:
        """Read the memories as they are now. One that can't be read just now counts as it was, with workers' memory as
        the only memory in use: whoever waits for it is not told that the machine has none. `locked_bytes` of main
        memory count as free: sleeping models leave for whoever needs them."""
        read = {state.id: state for provider in self._providers for state in provider.devices()}
        if (host := read.get(HOST)) is not None:
            read[HOST] = replace(host, free=min(host.total, host.free + locked_bytes))
        if not self.residents:  # what is in use now is others', and may be less than at the start
            for state in read.values():
                self._others[state.id] = min(_others(state), self._others.get(state.id, state.total))
        unread = [replace(known, is_trusted=False) for known in self.needs.devices if known.id not in read]
        self.devices = tuple(map(self._device, [*read.values(), *unread]))

    def free_of(self, device: str) -> int | None:
        """Return the bytes of a device that a worker may take, as if no model slept; None: there is no such device."""
        found = next((each for each in self.devices if each.id == device), None)
        if found is None:
            return None
        workers = [worker_of(self.told(each), self._host, 0.0) for each in self.residents.values()]
        held = [(each, part) for each in workers for part in each.shares if part.device == device]
        return free_bytes(found, held)

    def told(self, resident: Resident) -> ToldWorker:
        """Return a worker as the planner is told of it."""
        return ToldWorker(
            id=resident.id,
            name=resident.worker.worker_id,
            model=resident.model,
            shares=_shares(resident),
            status=resident.status,
            since=resident.since,
            last_used=resident.last_used if resident.last_used != NEVER else 0.0,
            num_running=resident.num_running,
            is_settling=resident.status == "reserved" and time.time() < resident.settles_at,
            is_stale=self._is_stale(resident),
            replaces=resident.replaces,
            load_s=resident.load_s,
            released_at=resident.released_at,
        )

    def _is_stale(self, resident: Resident) -> bool:
        """Return whether a worker has other settings than its model, with which that can be loaded."""
        prediction = self.needs.found.get(resident.model)
        return prediction is not None and not is_served_alike(prediction.wanted, resident.worker.wanted)

    def _device(self, state: DeviceState) -> Device:
        id_ = CPU if state.id == HOST else state.id
        others = self._others.get(state.id, int(RESERVE_SHARE * state.total))
        return Device(id_, state.total, state.free, others, state.is_trusted)


def _shares(resident: Resident) -> tuple[Share, ...]:
    """Return the worker's shares; while it loads, with what main memory has given it so far."""
    if resident.status != "loading":
        return resident.shares
    seen = resident.seen_bytes
    return tuple(replace(share, seen_bytes=seen) if share.device == CPU else share for share in resident.shares)


def _others(device: DeviceState) -> int:
    """Return the bytes of a device that others use before any worker runs, and what is left to them."""
    return device.total - device.free + int(RESERVE_SHARE * device.total)
