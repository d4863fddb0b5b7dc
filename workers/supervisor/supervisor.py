"""Finds the GPUs of this machine, plans which workers run on it with which model and devices, keeps the workers running
and stops them together.

GPUs are listed by the driver's own program, `nvidia-smi`; CUDA is never loaded.
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
from workers.models.cores import cores_of, shares_of, text_of
from workers.models.spec import LlamaSettings, ModelSpec
from workers.process import black_box
from workers.protocol import keys
from workers.protocol.exits import FINAL, Exit
from workers.settings import EveryWorkerSettings, ModelSettings, PaddockSettings, SupervisorSettings, WorkerSettings
from workers.supervisor import state_folder
from workers.supervisor.child import Child, Recipe, WorkerSlot, describe
from workers.supervisor.fleet import Fleet
from workers.supervisor.output import Console, Output

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


KILL_MARGIN_S = 5.0
"""Seconds that a stopping worker gets beyond its time to drain (`worker_drain_s`); then it is killed."""

OF_MODELS = ModelSettings.model_fields.keys() - PaddockSettings.model_fields.keys()

KEPT_BACK = frozenset(map(sources.variable, {"api_key", "api_keys", "gateway_secret", "worker_redis_url", *OF_MODELS}))
"""Variables that workers don't inherit: those only for gateways, and the model's settings, which a spec file has."""

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
    device: str | None
    """The worker's GPUs, separated by commas; None: this machine has none."""
    neighbours: int
    """Number of workers on this machine, this one included; they share its memory."""


def plan(served: Sequence[ModelSpec], cores: int, devices: Sequence[str], host: str) -> tuple[PlannedWorker, ...]:
    """Return each model's workers, in the catalog's order. Devices are dealt in turn, cores divided evenly. Pure.

    Raises CatalogError if a worker wants more devices than there are."""
    models = [model for model in served for _ in range(model.workers)]
    threads = max(1, cores // max(1, len(models)))
    dealt = _dealt(models, devices)
    own = [llama for model in served for llama in _settings(model, threads)]
    return tuple(
        PlannedWorker(
            name=f"worker-{number}",
            worker_id=f"{host}-{number}",
            model=replace(model, llama=own[number]),
            device=dealt[number],
            neighbours=len(models),
        )
        for number, model in enumerate(models)
    )


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


class Supervisor:
    """Keeps the planned workers running, until `stop` is called or all have ended for reasons that forbid a restart."""

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
        """`on_final(exit code, readable reason)` is called for each worker that ends by itself and is not restarted."""
        self._settings = settings
        self._fleet = fleet
        self._console = console
        self._on_final = on_final
        self._black_boxes = {worker.name: black_box.BoxReader(black_box_of(worker, settings)) for worker in workers}
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
        """Keep the workers running until all have ended. Return the code of the first that failed for good, else OK."""
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
        """Stop all workers at the same time, each within its time to drain; return when none of them runs any more."""
        await asyncio.gather(*(slot.stop() for slot in self._slots.values()))

    def hurry(self) -> None:
        for slot in self._slots.values():
            slot.hurry()

    def _child(self, worker: PlannedWorker, recipe: Recipe) -> Child:
        output = self._outputs[worker.name] = Output(worker.name, self._logs, self._console)
        return Child(
            recipe,
            output,
            on_death=partial(self._bury, worker),
            prepare=partial(self._prepare, worker),
            is_prepared=partial(
                state_folder.holds, spec_file_of(worker, self._settings), msgspec.json.encode(worker.model)
            ),
        )

    async def _prepare(self, worker: PlannedWorker) -> None:
        """Write the worker's spec file again, if somebody has removed or changed it. Raises OSError."""
        self._black_boxes[worker.name].forget()
        write_specs([worker], self._settings)

    async def _listen(self) -> None:
        """Stop workers whose model an admin unloads, and start them again when it is loaded. All models count as loaded
        when a supervisor starts."""
        this = asyncio.current_task()
        models = sorted(set(self._models.values()))
        begun = False
        # Checked in each round, since redis-py can swallow a cancellation before Python 3.12 (python/cpython#86296).
        while this is None or not this.cancelling():
            unloaded = await self._fleet.unloaded(models, forget=not begun)
            if unloaded is not None:
                begun = True
                for name, slot in self._slots.items():
                    slot.want(self._models[name] not in unloaded)
            await asyncio.sleep(keys.SUPERVISED_INTERVAL_S)

    async def _bury(self, worker: PlannedWorker, code: int, is_final: bool) -> None:
        running = self._black_boxes[worker.name].take()
        if running is not None:
            told = black_box.describe(running)
            self._outputs[worker.name].note(f"paddock: {worker.name} died ({describe(code)}) while running {told}")
        await self._fleet.forget(worker.model.name, worker.worker_id)
        if is_final:
            complaint = self._outputs[worker.name].complaint()
            self._on_final(code, f"{worker.name} can't serve {worker.model.name} ({describe(code)}): {complaint}")

    def _clear_away(self) -> None:
        """Remove the workers' files. Report which requests ran on workers that had to be killed when stopped."""
        for path in self._spec_files:
            state_folder.remove(path, self._console.say)
        for name, box in self._black_boxes.items():
            if running := box.take():
                self._console.say(f"paddock: {name} was killed while running {black_box.describe(running)}")


def black_box_of(worker: PlannedWorker, settings: SupervisorSettings) -> Path:
    """Return the file in which a worker keeps the ids of its running requests. It is in the private state folder."""
    return settings.state_dir / "run" / f"{worker.name}.calls"


def spec_file_of(worker: PlannedWorker, settings: SupervisorSettings) -> Path:
    """Return the file from which a worker reads its model's spec, which can be too long for a variable."""
    return settings.state_dir / "run" / f"{worker.name}.json"


def write_specs(workers: Iterable[PlannedWorker], settings: SupervisorSettings) -> None:
    """Write the workers' spec files, readable by their user only, and make their folder. Raises OSError.

    A file that is right is left alone: on a full disk nothing could take its place."""
    state_folder.make(settings.state_dir)
    for worker in workers:
        state_folder.write_whole(spec_file_of(worker, settings), msgspec.json.encode(worker.model))


def recipe(worker: PlannedWorker, settings: SupervisorSettings, environment: Mapping[str, str]) -> Recipe:
    """Return a worker's command. Its environment has all settings except the model's: they are in its spec file."""
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
