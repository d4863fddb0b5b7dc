"""Keeps this machine's workers running and stops them together; which workers these are can change meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from workers import sources
from workers.forkserver.client import CAN_FORK, ForkServer
from workers.process import black_box
from workers.protocol import keys
from workers.protocol.exits import FINAL, Exit
from workers.redis.trouble import raise_if_cancelled
from workers.settings import EveryWorkerSettings, ModelSettings, PaddockSettings, SupervisorSettings, WorkerSettings
from workers.supervisor import state_folder
from workers.supervisor.child import Child, WorkerSlot
from workers.supervisor.fleet import Fleet
from workers.supervisor.loading.file_check import fault_of
from workers.supervisor.loading.history import Death
from workers.supervisor.output import Console, Output
from workers.supervisor.plan import PlannedWorker, environment_of
from workers.supervisor.processes import Recipe, describe, started

REGISTERED_LOOK_S = 0.1

LEAVING_PATIENCE_S = 30.0
"""Seconds for which new workers wait until those are gone that are not wanted any more."""

KILL_MARGIN_S = 5.0
"""Seconds that a stopping worker gets beyond its time to drain (`worker_drain_s`); then it is killed."""

OF_MODELS = ModelSettings.model_fields.keys() - PaddockSettings.model_fields.keys()

KEPT_BACK = frozenset(map(sources.variable, {"api_key", "api_keys", "gateway_secret", "worker_redis_url", *OF_MODELS}))
"""Variables that workers don't inherit: those only for gateways, and the model's settings, which a spec file has."""


@dataclass(slots=True)
class _Post:
    """One of the workers that are kept, and what keeps it."""

    worker: PlannedWorker
    slot: WorkerSlot
    keeping: asyncio.Task[int] | None = None
    """Ends with the last exit code; None: it has not begun."""
    replacing: asyncio.Task[None] | None = None
    """Ends when the process that is to be replaced is gone; None: none has been replaced."""
    is_coming: bool = False
    """Whether a process with other settings was asked for and has not registered yet."""
    is_leaving: bool = False
    """Whether the worker drains because it is not wanted any more."""

    @property
    def is_over(self) -> bool:
        return self.keeping is not None and self.keeping.done()


class Chooser(Protocol):
    """Decides which workers are wanted, while they run."""

    def note_death(self, worker: PlannedWorker, death: Death) -> None:
        """Note that a worker's process has ended by itself."""
        ...

    def wake(self) -> None:
        """Decide soon: a worker that was to leave is gone."""
        ...


class Supervisor:
    """Keeps the wanted workers running, until `stop` is called or all have ended for reasons that forbid a restart."""

    def __init__(
        self,
        workers: Sequence[PlannedWorker],
        settings: SupervisorSettings,
        fleet: Fleet,
        console: Console,
        *,
        environment: Mapping[str, str],
        on_final: Callable[[int, str], None],
        chooser: Chooser | None = None,
    ) -> None:
        """`on_final(exit code, readable reason)` is called for each worker that ends by itself and is not restarted.
        `chooser` calls `want` as models are loaded and unloaded; None: only an admin unloads some."""
        self._settings = settings
        self._fleet = fleet
        self._console = console
        self._environment = environment
        self._on_final = on_final
        self._chooser = chooser
        self._logs = settings.state_dir / "logs"
        self._outputs: dict[str, Output] = {}
        self._black_boxes: dict[str, black_box.BoxReader] = {}
        self._forks: ForkServer | None = None
        if settings.fork_workers and CAN_FORK:
            self._forks = ForkServer(self._logs, console, environment, forks_ahead=chooser is not None)
        self._wanted = tuple(workers)
        self._posts = {worker.name: self._post(worker) for worker in workers}
        self._changed = asyncio.Event()
        """Set when other workers are wanted than those that are being arranged for."""
        self._settled = asyncio.Event()
        """Set while the workers that are kept are those that are wanted."""
        self._settled.set()
        self._stopping = False
        self._over = asyncio.Event()
        """Set when all are asked to stop."""

    @property
    def wanted(self) -> tuple[PlannedWorker, ...]:
        """The workers that should run."""
        return self._wanted

    @property
    def is_stopping(self) -> bool:
        """Return whether all have been asked to stop."""
        return self._stopping

    @property
    def pids(self) -> dict[str, int | None]:
        return {name: post.slot.pid for name, post in self._posts.items()}

    def want(self, workers: Sequence[PlannedWorker]) -> None:
        """Have these workers run from now on, without waiting. Those that are told by name and equal go on untouched.

        First, workers that are not among them drain, all at once; then, or LEAVING_PATIENCE_S later, new ones start;
        then changed ones are replaced, one after the other, each by a process that registers before the next one
        drains: calls that come meanwhile wait or go to the model's other workers. No worker may have the name of one
        that still drains (`pids` has all names that are taken). Nothing happens once all have been asked to stop."""
        if self._stopping:
            return
        self._wanted = tuple(workers)
        self._settled.clear()
        self._changed.set()

    def reserve(self, name: str, reserved: bool) -> None:
        """Have a worker that has registered get no new calls (or get calls again), without waiting."""
        post = self._posts.get(name)
        if post is not None:
            post.slot.reserve(reserved)

    async def keep(self) -> int:
        """Keep the workers running until all have ended. Return the code of the first that failed for good, else OK."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for post in self._posts.values():
                    post.keeping = tasks.create_task(post.slot.keep())
                beside = [tasks.create_task(self._follow(tasks))]
                beside += [] if self._chooser is not None else [tasks.create_task(self._listen())]
                beside += [] if self._forks is None else [tasks.create_task(self._forks.keep())]
                while running := self._running():
                    await asyncio.wait(running)
                for task in beside:
                    task.cancel()
        finally:
            self._clear_away()
        codes = [post.keeping.result() for post in self._posts.values() if post.keeping is not None]
        return next((code for code in codes if code in FINAL and code != Exit.OK), int(Exit.OK))

    async def stop(self) -> None:
        """Stop all workers at the same time, each within its time to drain; return when none of them runs any more."""
        self._stopping = True
        self._over.set()
        self._changed.set()
        await asyncio.gather(*(post.slot.stop() for post in self._posts.values()))

    def hurry(self) -> None:
        for post in self._posts.values():
            post.slot.hurry()

    def give_up(self, name: str) -> None:
        """Have a worker that hangs killed at once when it is not wanted any more."""
        if name in self._posts:
            self._posts[name].slot.hurry()

    def record_of(self, worker: PlannedWorker) -> Path:
        """Return the file in which a worker tells what it does (`workers.process.black_box`)."""
        return black_box_of(worker, self._settings)

    def _running(self) -> list[asyncio.Task[Any]]:
        """Return what is to be waited for until all has ended."""
        running: list[asyncio.Task[Any]] = [post.keeping for post in self._posts.values() if post.keeping is not None]
        running = [task for task in running if not task.done()]
        if self._chooser is not None and not self._stopping:
            return [*running, asyncio.ensure_future(self._over.wait())]
        return running or ([] if self._settled.is_set() else [asyncio.ensure_future(self._settled.wait())])

    def _post(self, worker: PlannedWorker) -> _Post:
        self._black_boxes[worker.name] = black_box.BoxReader(black_box_of(worker, self._settings))
        return _Post(worker, WorkerSlot(self._maker(worker)))

    def _maker(self, worker: PlannedWorker) -> Callable[[], Child]:
        return partial(self._child, worker, recipe(worker, self._settings, self._environment))

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Arrange for the workers that are wanted, each time that these are others, until cancelled."""
        while not self._stopping:
            await self._changed.wait()
            self._changed.clear()
            await self._arrange(tasks, self._wanted)
            if not self._changed.is_set():
                self._settled.set()
        self._settled.set()

    async def _arrange(self, tasks: asyncio.TaskGroup, wanted: Sequence[PlannedWorker]) -> None:
        """Keep these workers in place of those that are kept. Return early if others are wanted meanwhile."""
        named = {worker.name for worker in wanted}
        gone = [post for name, post in self._posts.items() if name not in named and not post.is_leaving]
        if gone:  # they hold memory that new ones may need; but an answer can take an hour
            for post in gone:
                post.is_leaving = True
            leaving = [tasks.create_task(self._dismiss(post)) for post in gone]
            if self._chooser is None:  # which wants none before there is memory for it
                await asyncio.wait(leaving, timeout=LEAVING_PATIENCE_S)
        if self._stopping or self._changed.is_set():
            return
        for worker in wanted:
            if worker.name not in self._posts:
                self._console.say(f"paddock: {worker.name} starts: {worker.model.name}")
                self._begin(tasks, worker)
        broken = set[str]()
        for worker in wanted:
            post = self._posts[worker.name]
            if worker.model.name in broken or (post.worker == worker and not post.is_coming):
                continue
            await self._exchange(tasks, worker)
            if self._stopping or self._changed.is_set():
                return
            if self._posts[worker.name].is_over:
                # Workers that serve are not given up for settings with which none can run.
                self._console.say(f"paddock: other workers of {worker.model.name} stay as they are")
                broken.add(worker.model.name)

    def _begin(self, tasks: asyncio.TaskGroup, worker: PlannedWorker) -> None:
        post = self._posts[worker.name] = self._post(worker)
        post.keeping = tasks.create_task(post.slot.keep())

    async def _dismiss(self, post: _Post) -> None:
        """Drain a worker that is not wanted any more, and forget it."""
        name = post.worker.name
        self._console.say(f"paddock: {name} drains: {post.worker.model.name} is not wanted here any more")
        await post.slot.stop()
        del self._posts[name]
        self._remove_files(post.worker)
        if self._chooser is not None:
            self._chooser.wake()

    async def _exchange(self, tasks: asyncio.TaskGroup, worker: PlannedWorker) -> None:
        """Replace a worker's process by one with other settings; return when that has registered or has ended for good,
        or when other workers are wanted."""
        post = self._posts[worker.name]
        if post.worker != worker:
            self._console.say(f"paddock: {worker.name} is being replaced: {worker.model.name} has changed")
            if post.is_over:  # with these settings it may run
                self._begin(tasks, worker)
            else:
                post.worker = worker
                post.replacing = tasks.create_task(post.slot.replace(self._maker(worker)))
            post = self._posts[worker.name]
            post.is_coming = True
        while not (self._stopping or self._changed.is_set() or post.is_over):
            is_gone = post.replacing is None or post.replacing.done()
            if is_gone and (not post.slot.is_wanted or await self._is_registered(worker)):
                post.is_coming = False
                return
            await asyncio.sleep(REGISTERED_LOOK_S)

    async def _is_registered(self, worker: PlannedWorker) -> bool:
        return bool(await self._fleet.present({worker.worker_id: worker.model.name}))

    def _child(self, worker: PlannedWorker, recipe: Recipe) -> Child:
        output = self._outputs[worker.name] = Output(worker.name, self._logs, self._console)
        return Child(
            recipe,
            output,
            on_death=partial(self._bury, worker),
            start=started if self._forks is None else self._forks.start,
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
        """Stop workers whose model an admin unloads, and start them again when it is loaded. A model counts as loaded
        when this supervisor begins to keep it."""
        begun: frozenset[str] = frozenset()
        while True:
            raise_if_cancelled()
            models = frozenset(post.worker.model.name for post in self._posts.values())
            begun &= models
            if fresh := models - begun:
                begun = models if await self._fleet.unloaded(sorted(fresh), forget=True) is not None else begun
            unloaded = await self._fleet.unloaded(sorted(begun), forget=False) if begun else None
            for post in self._posts.values():
                if unloaded is not None and post.worker.model.name in begun:
                    post.slot.want(post.worker.model.name not in unloaded)
            await asyncio.sleep(keys.SUPERVISED_INTERVAL_S)

    async def _bury(self, worker: PlannedWorker, code: int, is_final: bool) -> None:
        progress = black_box.progress_of(black_box_of(worker, self._settings))
        running = self._black_boxes[worker.name].take()
        if running is not None:
            told = f"running {black_box.describe(running)}" if progress is None else f"loading ({progress:.0%} done)"
            self._outputs[worker.name].note(f"paddock: {worker.name} died ({describe(code)}) while {told}")
        await self._fleet.forget(worker.model.name, worker.worker_id)
        fault = await asyncio.to_thread(fault_of, worker.model, code)
        if fault:
            self._outputs[worker.name].note(f"paddock: {worker.name} died of a file of {worker.model.name}: {fault}")
        complaint = fault or self._outputs[worker.name].complaint()
        if self._chooser is not None:
            lines = self._outputs[worker.name].recent()
            self._chooser.note_death(worker, Death.told(code, complaint, lines, is_final=is_final, found=fault))
        if is_final:
            self._on_final(code, f"{worker.name} can't serve {worker.model.name} ({describe(code)}): {complaint}")

    def _clear_away(self) -> None:
        """Remove the workers' files. Report which requests ran on workers that had to be killed when stopped."""
        for post in self._posts.values():
            self._remove_files(post.worker)

    def _remove_files(self, worker: PlannedWorker) -> None:
        state_folder.remove(spec_file_of(worker, self._settings), self._console.say)
        if running := self._black_boxes[worker.name].take():
            self._console.say(f"paddock: {worker.name} was killed while running {black_box.describe(running)}")


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
            "redis_url": settings.worker_redis_url or settings.redis_url,
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
