"""Makes the rows about memory: of machines, and of what a model's worker takes there."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.api.overview.rows import DeviceRow, MachineRow, MemoryRow, PlacedWorkerRow
from workers.planner.merge import MachineView
from workers.planner.messages import ToldMemory
from workers.residency.ledger import free_bytes
from workers.residency.picture import Device

MIB = 1 << 20


def machine_row(view: MachineView) -> MachineRow:
    """Return the row of a machine."""
    return MachineRow(
        is_leaving=view.report.is_leaving,
        devices=tuple(_device(device, view) for device in view.report.devices),
        workers=tuple(
            PlacedWorkerRow(
                worker=told.name,
                model=told.model,
                status=told.status,
                bytes={share.device: share.bytes for share in told.shares},
            )
            for told in view.report.workers
        ),
        failures={model: failure.why.whole for model, failure in view.report.failures.items()},
    )


def _device(device: Device, view: MachineView) -> DeviceRow:
    shares = [(worker, share) for worker in view.workers for share in worker.shares if share.device == device.id]
    free = max(0, free_bytes(device, shares))
    return DeviceRow(
        id=device.id,
        total_bytes=device.total_bytes,
        free_bytes=free // MIB * MIB,  # it changes all the time by little, and each change is sent to all viewers
        planned_bytes=sum(share.bytes for _, share in shares),
    )


def memory_rows(model: str, machines: Mapping[str, MachineView]) -> dict[str, MemoryRow]:
    """Return machine -> what a worker of the model takes there, of the machines that have predicted it."""
    found: dict[str, MemoryRow] = {}
    for name, view in machines.items():
        told = None if view.catalog is None else view.catalog.models.get(model)
        if told is not None and told.memory is not None:
            found[name] = _memory(told.memory)
    return found


def _memory(told: ToldMemory) -> MemoryRow:
    return MemoryRow(
        predicted=told.host + sum(told.gpus),
        weights=told.weights,
        cells=told.cells,
        compute=told.compute,
        other=told.other,
        growth=told.growth,
        taken=told.taken_host + sum(told.taken_gpus) if told.taken_host else None,
    )
