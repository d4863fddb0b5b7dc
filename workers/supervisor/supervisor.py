"""Plans one machine's workers, their models and devices, keeps them alive and stops them together."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from workers import black_box, sources
from workers.protocol import keys
from workers.protocol.catalog import Catalog, CatalogError, ModelSpec
from workers.protocol.exits import FINAL, Exit
from workers.settings import SupervisorSettings, WorkerSettings
from workers.supervisor import gpus
from workers.supervisor.child import Child, Recipe, describe
from workers.supervisor.fleet import Fleet
from workers.supervisor.output import Console, Output
from workers.supervisor.seat import Seat

KILL_MARGIN_S = 5.0
"""Seconds that a worker gets beyond its own drain time before it is killed."""

KEY_VARIABLES = frozenset(map(sources.variable, ("api_key", "api_keys", "gateway_secret", "worker_redis_url")))

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of CPU per period that this control group may use, or `max`. Source: Linux, cgroup-v2, cpu.max."""


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's place on this machine; it stays the same over restarts."""

    name: str
    """Name for log lines: `worker-0`."""
    worker_id: str
    model: ModelSpec
    file: Path
    device: str | None
    """Its GPUs, divided by commas; None: this machine has none."""
    threads: int
    neighbours: int
    """Workers of this machine, itself included: they share its memory."""


def plan(
    catalog: Catalog, files: Mapping[str, Path], cores: int, devices: Sequence[str], host: str
) -> tuple[Place, ...]:
    """Return each model's workers, in the catalog's order; devices go round, cores are divided evenly. Pure.

    Raises CatalogError: a worker wants more devices than there are.
    """
    models = [model for model in catalog.models for _ in range(model.workers)]
    threads = max(1, cores // max(1, len(models)))
    dealt = _dealt(models, devices)
    return tuple(
        Place(
            name=f"worker-{number}",
            worker_id=f"{host}-{number}",
            model=model,
            file=files[model.name],
            device=dealt[number],
            threads=model.llama.n_threads or threads,
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
    """Keeps a worker in each place. `keep` returns when `stop` was called, or when no worker may be started again."""

    def __init__(
        self,
        places: Sequence[Place],
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
        self._black_boxes = {place.name: black_box_of(place, settings) for place in places}
        self._logs = settings.state_dir / "logs"
        self._outputs: dict[str, Output] = {}
        self._models = {place.name: place.model.name for place in places}
        self._seats = {
            place.name: Seat(partial(self._child, place, recipe(place, settings, environment))) for place in places
        }

    @property
    def pids(self) -> dict[str, int | None]:
        return {name: seat.pid for name, seat in self._seats.items()}

    async def keep(self) -> int:
        """Keep the workers; return OK, or the first exit code that kept a worker away."""
        try:
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(self._listen())
                running = [tasks.create_task(seat.keep()) for seat in self._seats.values()]
                await asyncio.wait(running)
                listener.cancel()
        finally:
            self._clear_away()
        codes = [task.result() for task in running]
        return next((code for code in codes if code in FINAL and code != Exit.OK), int(Exit.OK))

    async def stop(self) -> None:
        """Stop all workers at once; each drains within its bound. Returns when none runs."""
        await asyncio.gather(*(seat.stop() for seat in self._seats.values()))

    def hurry(self) -> None:
        for seat in self._seats.values():
            seat.hurry()

    def _child(self, place: Place, recipe: Recipe) -> Child:
        output = self._outputs[place.name] = Output(place.name, self._logs, self._console)
        return Child(recipe, output, on_death=partial(self._bury, place))

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
                for name, seat in self._seats.items():
                    seat.want(self._models[name] not in unloaded)
            await asyncio.sleep(keys.SUPERVISED_INTERVAL_S)

    async def _bury(self, place: Place, code: int, is_final: bool) -> None:
        running = black_box.take(self._black_boxes[place.name])
        if running is not None:
            told = black_box.describe(running)
            self._outputs[place.name].note(f"paddock: {place.name} died ({describe(code)}) while running {told}")
        await self._fleet.forget(place.model.name, place.worker_id)
        if is_final:
            complaint = self._outputs[place.name].complaint()
            self._on_final(code, f"{place.name} can't serve {place.model.name} ({describe(code)}): {complaint}")

    def _clear_away(self) -> None:
        """Remove the records of workers that had to be killed while they stopped, and report what they ran."""
        for name, path in self._black_boxes.items():
            if running := black_box.take(path):
                self._console.say(f"paddock: {name} was killed while running {black_box.describe(running)}")


def black_box_of(place: Place, settings: SupervisorSettings) -> Path:
    """Return the file in which a place's worker keeps its running requests' ids; private, as the state folder is."""
    return settings.state_dir / "run" / f"{place.name}.calls"


def recipe(place: Place, settings: SupervisorSettings, environment: Mapping[str, str]) -> Recipe:
    """Return the command of a place's worker: everything it needs to know travels in its environment."""
    model = place.model
    worker = WorkerSettings.model_construct(
        config=settings.config,
        state_dir=settings.state_dir,
        redis_url=settings.redis_url,
        worker_secret=settings.worker_secret,
        log_level=settings.log_level,
        log_format="json",
        otlp_endpoint=settings.otlp_endpoint,
        otlp_headers=settings.otlp_headers,
        model=place.file,
        alias=model.name,
        slots=model.slots,
        ctx=model.ctx,
        kv_tokens=model.kv_tokens,
        worker_id=place.worker_id,
        worker_host=settings.worker_host,
        worker_port=0,
        worker_address="",
        worker_drain_s=settings.worker_drain_s,
        workers_on_machine=place.neighbours,
        cache_ram_mib=settings.cache_ram_mib,
        step_timeout_s=settings.step_timeout_s,
        core_dumps=settings.core_dumps,
        black_box=black_box_of(place, settings),
        llama=msgspec.json.encode(msgspec.structs.replace(model.llama, n_threads=place.threads)).decode(),
        sampling=msgspec.json.encode(model.sampling).decode(),
        adapters=msgspec.json.encode(model.adapters).decode(),
        tool_family=model.tool_family,
        open_objects=model.open_objects,
        chat_template=model.chat_template,
        thinking=model.thinking_mode,
        thinking_budget=model.thinking_budget,
        thinking_budget_message=model.thinking_budget_message,
        chat_template_kwargs=msgspec.json.encode(model.chat_template_kwargs).decode(),
        shared_prompts=msgspec.json.encode(model.shared_prompts).decode(),
        adapters_dir=settings.adapters_dir,
        max_adapters=settings.max_adapters,
        adapters_mib=settings.adapters_mib,
        cache_dir=settings.cache_dir,
        cache_disk_mib=settings.cache_disk_mib,
        cache_secret=settings.cache_secret,
        slot_save_dir=settings.slot_save_dir,
        slot_save_mib=settings.slot_save_mib,
        slot_save_mib_per_team=settings.slot_save_mib_per_team,
        slot_saves_per_team=settings.slot_saves_per_team,
    )
    # Only gateways need the callers' keys.
    inherited = {name: value for name, value in environment.items() if name not in KEY_VARIABLES}
    variables = sources.environment_of(worker, inherited) | gpus.environment_of(place.device)
    argv = (sys.executable, "-m", "workers.cli", "worker")
    return Recipe(place.name, argv, variables, settings.worker_drain_s + KILL_MARGIN_S)
