"""`paddock models plan`: tells what the catalog's models would take on this machine, before anything runs.

It prints the bytes of each worker by part and by device, what is free there now, and whether all workers fit together
(docs/models.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from workers.commands.models.parser import Request
from workers.footprint.devices import DeviceState, providers
from workers.footprint.footprint import Footprint, Share
from workers.footprint.learned import FILE, Learned, key_of
from workers.footprint.predict import Bounds, predict
from workers.footprint.prediction import Unpredictable, build_of, dry_run
from workers.models.folder.folder import named_by
from workers.models.spec import ModelSpec
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings
from workers.supervisor.needs import bounds_of

PARTS = ("weights", "cells", "compute", "other")


class PlannedShare(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a worker would take of one device."""

    device: str
    weights: int
    cells: int
    compute: int
    other: int
    total: int


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the plan."""

    model: str
    worker: int
    """Number of the worker among the model's, from 0."""
    shares: tuple[PlannedShare, ...] = ()
    num_cells: int = 0
    growth: int = 0
    """Bytes of main memory that it may take later."""
    fits: bool = False
    why: str = ""
    """Why it does not fit, or why that can't be told."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One memory of the machine."""

    id: str
    kind: str
    name: str
    total: int
    free: int
    planned: int
    """Bytes that the workers of the plan take of it."""
    is_trusted: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `--json`."""

    devices: tuple[Device, ...]
    workers: tuple[Planned, ...]
    fits: bool


def run(request: Request) -> Exit:
    """Print the plan for this machine as it is now, and return the exit code. Raises CatalogError, ModelUnusable."""
    settings = request.settings
    found = [state for provider in providers() for state in provider.devices()]
    plan = planned(settings, request.library.locate_all(named_by(settings)), found)
    print(msgspec.json.encode(plan).decode() if request.options.json else as_text(plan))
    return Exit.OK if plan.fits else Exit.NO_MEMORY


@dataclass(frozen=True, slots=True)
class _Machine:
    """The machine's devices, and what is left of each as workers are placed."""

    states: tuple[DeviceState, ...]
    left: dict[str, int]

    @classmethod
    def of(cls, states: Sequence[DeviceState]) -> _Machine:
        return cls(tuple(states), {state.id: state.free for state in states})

    @property
    def host(self) -> str:
        return next((state.id for state in self.states if state.kind == "cpu"), "")

    def gpus_for(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return the GPUs with most room, as many as a worker of the model gets; empty: it computes without one."""
        gpus = [state.id for state in self.states if state.kind == "gpu"]
        if not spec.llama.uses_devices:
            return ()
        return tuple(sorted(gpus, key=lambda one: -self.left[one])[: spec.gpus])


def planned(settings: SupervisorSettings, models: Sequence[ModelSpec], states: Sequence[DeviceState]) -> Plan:
    """Return the plan for a machine with these devices. `models`: with their files. Blocks for a second for each."""
    machine, learned = _Machine.of(states), Learned(settings.state_dir / FILE)
    neighbours = sum(model.workers for model in models)
    bounds = bounds_of(settings)
    workers: list[Planned] = []
    for model in models:
        workers += _workers(model, machine, learned, neighbours, bounds)
    return Plan(
        devices=tuple(
            Device(
                id=state.id,
                kind=state.kind,
                name=state.name,
                total=state.total,
                free=state.free,
                planned=state.free - machine.left[state.id],
                is_trusted=state.is_trusted,
            )
            for state in states
        ),
        workers=tuple(workers),
        fits=all(worker.fits for worker in workers),
    )


def _workers(model: ModelSpec, machine: _Machine, learned: Learned, neighbours: int, bounds: Bounds) -> list[Planned]:
    """Place the workers of one model, each where most room is left."""
    on_gpu = bool(machine.gpus_for(model))
    host_free = next((state.free for state in machine.states if state.kind == "cpu"), None)
    try:
        run = dry_run(model, free_bytes=None if on_gpu else host_free, workers=neighbours)
    except Unpredictable as error:
        return [Planned(model=model.name, worker=number, why=str(error)) for number in range(model.workers)]
    told, mapped = [], 0
    for number in range(model.workers):
        gpus = machine.gpus_for(model)
        footprint = predict(run, model, bounds=bounds, gpus=[machine.left[one] for one in gpus])
        footprint = learned.corrected(key_of(model, build_of()), footprint)
        told.append(_placed(model, number, footprint, machine, gpus, mapped))
        mapped = footprint.mapped
    return told


def _placed(
    model: ModelSpec, number: int, footprint: Footprint, machine: _Machine, gpus: Sequence[str], mapped: int
) -> Planned:
    """Take a worker's bytes off what is left. `mapped`: bytes of its file that another worker has in memory already."""
    shares = dict(zip(gpus, footprint.gpus, strict=True))
    host = msgspec.structs.replace(footprint.host, weights=max(0, footprint.host.weights - mapped))
    if machine.host:
        shares[machine.host] = host
    short = [
        f"{device}: {_mib(share.total)} MiB are needed and {_mib(machine.left[device])} MiB are left"
        for device, share in shares.items()
        if share.total > machine.left[device]
    ]
    for device, share in shares.items():
        machine.left[device] -= share.total
    return Planned(
        model=model.name,
        worker=number,
        shares=tuple(_share(device, share) for device, share in shares.items()),
        num_cells=footprint.num_cells,
        growth=footprint.growth,
        fits=not short,
        why="; ".join(short),
    )


def _share(device: str, share: Share) -> PlannedShare:
    parts: Mapping[str, int] = {part: getattr(share, part) for part in PARTS}
    return PlannedShare(device=device, total=share.total, **parts)


def as_text(plan: Plan) -> str:
    """Return the plan as a table for people, in MiB."""
    head = f"{'model':24} {'worker':>6}  {'device':16} " + " ".join(f"{part:>9}" for part in (*PARTS, "total"))
    lines = [f"{head}  fits"]
    for worker in plan.workers:
        for share in worker.shares:
            sizes = " ".join(f"{_mib(getattr(share, part)):>9}" for part in (*PARTS, "total"))
            fits = "yes" if worker.fits else "no"
            lines.append(f"{worker.model:24.24} {worker.worker:>6}  {share.device:16.16} {sizes}  {fits}")
        if worker.why:
            lines.append(f"{worker.model:24.24} {worker.worker:>6}  {worker.why}")
    lines += ["", f"{'device':16} {'total':>10} {'free':>10} {'planned':>10} {'left':>10}"]
    for one in plan.devices:
        sizes = " ".join(f"{_mib(size):>10}" for size in (one.total, one.free, one.planned, one.free - one.planned))
        lines.append(f"{one.id:16.16} {sizes}  {one.name}".rstrip())
    later = sum(worker.growth for worker in plan.workers)
    lines += [
        "",
        f"All sizes are MiB. As they work, workers may take {_mib(later)} MiB more of main memory for caches.",
    ]
    lines.append("All workers fit." if plan.fits else "Not all workers fit: give fewer, smaller ones, or more memory.")
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
