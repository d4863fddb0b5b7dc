"""Finds the GPUs of this machine, plans its workers, their models and devices, keeps them alive and stops them
together.

The driver's own program is asked for the GPUs; CUDA is never loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from workers import sources
from workers.models.catalog import CatalogError
from workers.models.spec import ModelSpec
from workers.process import black_box
from workers.protocol import keys
from workers.protocol.exits import FINAL, Exit
from workers.settings import EveryWorkerSettings, ModelSettings, PaddockSettings, SupervisorSettings, WorkerSettings
from workers.supervisor.child import Child, Recipe, WorkerSlot, describe
from workers.supervisor.fleet import Fleet
from workers.supervisor.output import Console, Output

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
QUERY_TIMEOUT_S = 10.0


def visible(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices as `CUDA_VISIBLE_DEVICES` writes them; none: CPU only.

    An existing `CUDA_VISIBLE_DEVICES` is the whole truth; as in CUDA, what follows an invalid entry (-1) is hidden.
    """
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
    """Return the variables of a worker that has this device for itself; none where the machine has no GPU."""
    # nvidia-smi counts by PCI bus, CUDA by speed unless told otherwise.
    return {} if device is None else {VISIBLE: device, ORDER: "PCI_BUS_ID"}


KILL_MARGIN_S = 5.0
"""Seconds that a worker gets beyond its own drain time before it is killed."""

OF_MODELS = ModelSettings.model_fields.keys() - PaddockSettings.model_fields.keys()

KEPT_BACK = frozenset(map(sources.variable, {"api_key", "api_keys", "gateway_secret", "worker_redis_url", *OF_MODELS}))
"""Variables that workers don't inherit: only gateways need the callers' keys, and a spec says what the model is."""

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of CPU per period that this control group may use, or `max`. Source: Linux, cgroup-v2, cpu.max."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One of this machine's workers; it stays the same over restarts."""

    name: str
    """Name for log lines: `worker-0`."""
    worker_id: str
    model: ModelSpec
    """The model as its process gets it, with a number of threads."""
    device: str | None
    """Its GPUs, divided by commas; None: this machine has none."""
    neighbours: int
    """Workers of this machine, itself included: they share its memory."""


def plan(served: Sequence[ModelSpec], cores: int, devices: Sequence[str], host: str) -> tuple[PlannedWorker, ...]:
    """Return each model's workers, in the catalog's order; devices go round, cores are divided evenly. Pure.

    Raises CatalogError: a worker wants more devices than there are.
    """
    models = [model for model in served for _ in range(model.workers)]
    threads = max(1, cores // max(1, len(models)))
    dealt = _dealt(models, devices)
    return tuple(
        PlannedWorker(
            name=f"worker-{number}",
            worker_id=f"{host}-{number}",
            model=replace(model, llama=replace(model.llama, n_threads=model.llama.n_threads or threads)),
            device=dealt[number],
            neighbours=len(models),
        )
        for number, model in enumerate(models)
    )


def _dealt(models: Sequence[ModelSpec], devices: Sequence[str]) -> list[str | None]:
    """Return each worker's devices, as `CUDA_VISIBLE_DEVICES` writes them."""
    dealt: list[str | None] = []
    turn = 0
    for model in models:
        if devices and model.gpus > len(devices):
            raise CatalogError(
                f"models: each worker of {model.name} wants {model.gpus} GPUs and this machine has {len(devices)}; "
                "lower `gpus`"
            )
        own = [devices[(turn + number) % len(devices)] for number in range(model.gpus)] if devices else []
        turn += len(own)
        dealt.append(",".join(own) or None)
    return dealt


def host_id(state_dir: Path) -> str:
    """Return the prefix of this machine's worker ids; two state folders on it, and two machines, never share one."""
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", platform.node()) or "host"
    digest = hashlib.sha256(f"{platform.node()}:{state_dir.absolute()}".encode()).hexdigest()[:6]
    return f"{host[:40]}-{digest}"


def available_cores(quota: Path = CPU_QUOTA) -> int:
    """Return the CPU cores that this process may use, by its affinity and, in a container, by its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if microseconds == "max" else max(1, min(cores, int(microseconds) // int(period)))


class Supervisor:
    """Keeps the planned workers. `keep` returns when `stop` was called, or when no worker may be started again."""

    def __init__(
        self,
        workers: Sequence[PlannedWorker],
        settings: SupervisorSettings,
        fleet: Fleet,
        console: Console,
        *,
        environment: Mapping[str, str],
        on_final: Callable[[int, str], None],
    ) -> None:
        """`on_final(exit code, line for a person)` is called for each worker that ended unasked and stays away."""
        self._fleet = fleet
        self._console = console
        self._on_final = on_final
        self._black_boxes = {worker.name: black_box_of(worker, settings) for worker in workers}
        self._spec_files = [spec_file_of(worker, settings) for worker in workers]
        self._logs = settings.state_dir / "logs"
        self._outputs: dict[str, Output] = {}
        self._models = {worker.name: worker.model.name for worker in workers}
        self._slots = {
            worker.name: WorkerSlot(partial(self._child, worker, recipe(worker, settings, environment)))
            for worker in workers
        }

    @property
    def pids(self) -> dict[str, int | None]:
        return {name: slot.pid for name, slot in self._slots.items()}

    async def keep(self) -> int:
        """Keep the workers; return OK, or the first exit code that kept a worker away."""
        try:
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(self._listen())
                running = [tasks.create_task(seat.keep()) for seat in self._slots.values()]
                await asyncio.wait(running)
                listener.cancel()
        finally:
            self._clear_away()
        codes = [task.result() for task in running]
        return next((code for code in codes if code in FINAL and code != Exit.OK), int(Exit.OK))

    async def stop(self) -> None:
        """Stop all workers at once; each drains within its bound. Returns when none runs."""
        await asyncio.gather(*(slot.stop() for slot in self._slots.values()))

    def hurry(self) -> None:
        for slot in self._slots.values():
            slot.hurry()

    def _child(self, worker: PlannedWorker, recipe: Recipe) -> Child:
        output = self._outputs[worker.name] = Output(worker.name, self._logs, self._console)
        return Child(recipe, output, on_death=partial(self._bury, worker))

    async def _listen(self) -> None:
        """Stop workers while their model is unloaded, and start them again after. A new supervisor begins with all."""
        this = asyncio.current_task()
        models = sorted(set(self._models.values()))
        begun = False
        # Checked each round: redis-py can swallow a cancellation before Python 3.12 (python/cpython#86296).
        while this is None or not this.cancelling():
            unloaded = await self._fleet.unloaded(models, forget=not begun)
            if unloaded is not None:
                begun = True
                for name, slot in self._slots.items():
                    slot.want(self._models[name] not in unloaded)
            await asyncio.sleep(keys.SUPERVISED_INTERVAL_S)

    async def _bury(self, worker: PlannedWorker, code: int, is_final: bool) -> None:
        running = black_box.take(self._black_boxes[worker.name])
        if running is not None:
            told = black_box.describe(running)
            self._outputs[worker.name].note(f"paddock: {worker.name} died ({describe(code)}) while running {told}")
        await self._fleet.forget(worker.model.name, worker.worker_id)
        if is_final:
            complaint = self._outputs[worker.name].complaint()
            self._on_final(code, f"{worker.name} can't serve {worker.model.name} ({describe(code)}): {complaint}")

    def _clear_away(self) -> None:
        """Remove the workers' files, and report what those ran that had to be killed while they stopped."""
        for path in self._spec_files:
            path.unlink(missing_ok=True)
        for name, path in self._black_boxes.items():
            if running := black_box.take(path):
                self._console.say(f"paddock: {name} was killed while running {black_box.describe(running)}")


def black_box_of(worker: PlannedWorker, settings: SupervisorSettings) -> Path:
    """Return the file in which a worker keeps its running requests' ids; private, as the state folder is."""
    return settings.state_dir / "run" / f"{worker.name}.calls"


def spec_file_of(worker: PlannedWorker, settings: SupervisorSettings) -> Path:
    """Return the file by which a worker is told its model: it may be longer than a variable."""
    return settings.state_dir / "run" / f"{worker.name}.json"


def write_specs(workers: Iterable[PlannedWorker], settings: SupervisorSettings) -> None:
    """Write what the workers are to serve, for their user alone. Raises OSError."""
    for worker in workers:
        path = spec_file_of(worker, settings)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(worker.model))


def recipe(worker: PlannedWorker, settings: SupervisorSettings, environment: Mapping[str, str]) -> Recipe:
    """Return the command of a worker, whose environment says everything but its model (`spec_file_of`)."""
    handed_on = {name: getattr(settings, name) for name in EveryWorkerSettings.model_fields if name not in OF_MODELS}
    told = WorkerSettings.model_construct(
        **handed_on
        | {
            "log_format": "json",
            "worker_id": worker.worker_id,
            "worker_port": 0,
            "worker_address": "",
            "workers_on_machine": worker.neighbours,
            "black_box": black_box_of(worker, settings),
            "model_spec": spec_file_of(worker, settings),
        }
    )
    inherited = {name: value for name, value in environment.items() if name not in KEPT_BACK}
    variables = sources.environment_of(told, inherited) | environment_of(worker.device)
    argv = (sys.executable, "-m", "workers.cli", "worker")
    return Recipe(worker.name, argv, variables, settings.worker_drain_s + KILL_MARGIN_S)
