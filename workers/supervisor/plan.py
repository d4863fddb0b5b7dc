"""Plans which workers run on this machine, with which model and devices.

GPUs are listed by the driver's own program, `nvidia-smi`; CUDA is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from workers.models.catalog import CatalogError
from workers.models.catalog_faults import told
from workers.models.cores import cores_of, shares_of, text_of
from workers.models.spec import LlamaSettings, ModelSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
QUERY_TIMEOUT_S = 10.0


def visible(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs in the form of `CUDA_VISIBLE_DEVICES`; empty: CPU only.

    If that variable is set, it alone decides; as in CUDA, devices after an invalid entry (-1) are hidden."""
    if VISIBLE in environment:
        devices = [device.strip() for device in environment[VISIBLE].split(",")]
        end = next((n for n, device in enumerate(devices) if device in ("", "-1", "NoDevFiles", "none")), len(devices))
        return tuple(devices[:end])
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return ()
    try:
        answer = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip().isdigit())


def environment_of(device: str | None) -> dict[str, str]:
    """Return the variables that limit a worker to `device`; none if the machine has no GPU."""
    # nvidia-smi numbers devices by PCI bus, CUDA by speed unless told otherwise.
    return {} if device is None else {VISIBLE: device, ORDER: "PCI_BUS_ID"}


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with the microseconds of CPU that this control group may use in a period (or `max`), and the period. Source:
Linux, cgroup-v2, cpu.max."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One of this machine's workers. It stays the same when the worker's process is restarted."""

    name: str
    """Name for log lines: `worker-0`."""
    worker_id: str
    model: ModelSpec
    """The model's spec as the worker's process gets it, with the number of threads filled in."""
    wanted: ModelSpec
    """The model's spec as the catalog has it, with the paths of its files."""
    device: str | None
    """The worker's GPUs, separated by commas; None: this machine has none."""
    neighbours: int
    """Number of workers on this machine, this one included; they share its memory."""


@dataclass(frozen=True, slots=True)
class Site:
    """The machine that a plan is for, or the part of it that a supervisor may use."""

    cores: int
    devices: tuple[str, ...]
    """Its GPUs, in the form of `CUDA_VISIBLE_DEVICES`; none: CPU only."""
    host: str
    """Prefix of the workers' ids."""

    @classmethod
    def of(cls, state_dir: Path) -> Site:
        """Return this machine, for a supervisor with this state folder."""
        return cls(available_cores(), visible(os.environ), host_id(state_dir))


def plan(served: Sequence[ModelSpec], cores: int, devices: Sequence[str], host: str) -> tuple[PlannedWorker, ...]:
    """Return each model's workers, in the catalog's order. Devices are dealt in turn, cores divided evenly. Pure.

    Raises CatalogError if workers want more devices than there are."""
    if faults := [_too_many_devices(model, devices) for model in served if 0 < len(devices) < model.gpus]:
        raise CatalogError(told("models: ", faults))
    models = [model for model in served for _ in range(model.workers)]
    threads = max(1, cores // max(1, len(models)))
    dealt = _dealt(models, devices)
    own = [llama for model in served for llama in _settings(model, threads)]
    return tuple(
        PlannedWorker(
            name=f"worker-{number}",
            worker_id=f"{host}-{number}",
            model=replace(model, llama=own[number]),
            wanted=model,
            device=dealt[number],
            neighbours=len(models),
        )
        for number, model in enumerate(models)
    )


def replan(
    current: Sequence[PlannedWorker], served: Sequence[ModelSpec], site: Site, taken: Collection[str] = ()
) -> tuple[PlannedWorker, ...]:
    """Return the workers for the models that are served from now on, as near as possible to the current ones. Pure.

    A worker whose model is as it was stays as it is, whatever becomes of the others: its share of the cores as well.
    One whose model has changed keeps its name and, if it still wants as many, its devices. New ones get no name that a
    current one has, nor one of `taken`: workers that were dropped may still drain. Raises CatalogError as `plan` does.
    """
    left: dict[str, list[PlannedWorker]] = {}
    for worker in current:
        left.setdefault(worker.wanted.name, []).append(worker)
    names = {worker.name for worker in current} | set(taken)
    numbers = (number for number in count() if f"worker-{number}" not in names)
    placed: list[PlannedWorker] = []
    for fresh in plan(served, site.cores, site.devices, site.host):
        before = left.get(fresh.wanted.name)
        if not before:
            number = next(numbers)
            placed.append(
                replace_fields(fresh, name=f"worker-{number}", worker_id=f"{site.host}-{number}", device=None)
            )
            continue
        old = before.pop(0)
        if is_served_alike(old.wanted, fresh.wanted):
            placed.append(old)
        else:
            device = old.device if old.wanted.gpus == fresh.wanted.gpus else None
            placed.append(replace_fields(fresh, name=old.name, worker_id=old.worker_id, device=device))
    return tuple(_with_devices(placed, site.devices))


def is_served_alike(one: ModelSpec, other: ModelSpec) -> bool:
    """Return whether a worker of one spec can serve as one of the other: all is equal that a worker reads."""
    return _as_read(one) == _as_read(other)


def _as_read(model: ModelSpec) -> ModelSpec:
    """Return the spec without what no worker reads. How many workers there are counts where they share cores."""
    adapters = tuple(replace(adapter, scale=0.0, price=None) for adapter in model.adapters)
    workers = model.workers if model.llama.cpus else 1
    return replace(model, tags=(), price=None, residency=None, adapters=adapters, workers=workers)


def _with_devices(workers: Sequence[PlannedWorker], devices: Sequence[str]) -> Iterator[PlannedWorker]:
    """Yield the workers, those without devices with the ones that have the fewest workers."""
    used = Counter(device for worker in workers if worker.device for device in worker.device.split(","))
    for worker in workers:
        if worker.device is not None or not devices:
            yield worker
            continue
        own = sorted(devices, key=lambda device: used[device])[: worker.wanted.gpus]
        used.update(own)
        yield replace_fields(worker, device=",".join(own) or None)


def _settings(model: ModelSpec, threads: int) -> list[LlamaSettings]:
    """Return the settings of each of a model's workers, with its share of the model's `cpus`, and its threads: one for
    each of these cores, or `threads`."""
    llama = model.llama
    if not llama.cpus:
        return [replace(llama, n_threads=llama.n_threads or threads)] * model.workers
    shares = shares_of(cores_of(llama.cpus), model.workers)
    return [replace(llama, cpus=text_of(share), n_threads=llama.n_threads or len(share)) for share in shares]


def _dealt(models: Sequence[ModelSpec], devices: Sequence[str]) -> list[str | None]:
    """Return each worker's devices in the form of `CUDA_VISIBLE_DEVICES`; None for each if there are none."""
    dealt: list[str | None] = []
    turn = 0
    for model in models:
        own = [devices[(turn + number) % len(devices)] for number in range(model.gpus)] if devices else []
        turn += len(own)
        dealt.append(",".join(own) or None)
    return dealt


def _too_many_devices(model: ModelSpec, devices: Sequence[str]) -> str:
    return f"each worker of {model.name} wants {model.gpus} GPUs and this machine has {len(devices)}; lower `gpus`"


def host_id(state_dir: Path) -> str:
    """Return the prefix of this machine's worker ids, which differs between machines and between state folders."""
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", platform.node()) or "host"
    digest = hashlib.sha256(f"{platform.node()}:{state_dir.absolute()}".encode()).hexdigest()[:6]
    return f"{host[:40]}-{digest}"


def available_cores(quota: Path = CPU_QUOTA) -> int:
    """Return the number of CPU cores that this process may use, by its affinity and, in a container, by its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if microseconds == "max" else max(1, min(cores, int(microseconds) // int(period)))
