"""Reports of machines and their catalogs, written as briefly as a table allows."""

from __future__ import annotations

from typing import Any

from workers.planner.messages import MachineCatalog, MachineReport, ToldModel, ToldWorker
from workers.residency.picture import CPU, Device, Need, Share, Status
from workers.residency.policy import Residency, resolve

GIB = 2**30
NOW = 1_000_000.0


def report(at: float = NOW, *workers: ToldWorker, boot: str = "boot", gib: float = 64, **more: Any) -> MachineReport:
    """Return the report of a machine with main memory only, which its workers have left free."""
    used = sum(share.bytes for worker in workers for share in worker.shares)
    device = Device(CPU, int(gib * GIB), int(gib * GIB) - used)
    return MachineReport(at=at, boot=boot, devices=(device,), workers=workers, **more)


def told(id: str, model: str, gib: float = 10, status: Status = "ready", **more: Any) -> ToldWorker:
    shares = (Share(CPU, int(gib * GIB)),)
    more = {"since": NOW - 500, "last_used": NOW - 100, **more}
    return ToldWorker(id=id, model=model, shares=shares, status=status, **more)


def catalog(models_max: int = 0, /, **sizes: float | None) -> MachineCatalog:
    """Return a catalog of models that may have one worker each: name -> GiB; None: its need is not known."""
    models = {
        name: ToldModel(
            policy=resolve(Residency(min_resident_s=0.0), 1),
            need=Need(cpu_bytes=int(gib * GIB)) if gib is not None else None,
        )
        for name, gib in sizes.items()
    }
    return MachineCatalog(models=models, models_max=models_max)
