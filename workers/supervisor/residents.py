"""Loads this machine's models on demand: asks `workers.residency.decide` and has the supervisor do what it says.

Which calls wait is told by gateways through Redis; what a worker does, by its heartbeats; what is free, by the devices.
While Redis is away nothing is loaded and nothing leaves. Times are unix seconds, as gateways on other machines tell
when calls came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from msgspec import structs

from workers.footprint.devices import HOST, DeviceProvider, DeviceState, providers
from workers.footprint.learned import FILE, Learned
from workers.footprint.taken import taken_bytes
from workers.models.catalog import Catalog
from workers.models.files import parts
from workers.models.spec import ModelSpec
from workers.protocol import keys, residency
from workers.protocol.residency import MachineModels, ModelDemand, ModelState, ModelStatus
from workers.residency.decide import decide
from workers.residency.picture import (
    CPU,
    NEVER,
    Demand,
    Device,
    Machine,
    Model,
    Picture,
    Share,
    Status,
    Worker,
)
from workers.residency.plan import HOPELESS, Drain, Plan, Reserve, Start, Stop, Wait
from workers.residency.policy import Group
from workers.settings import SupervisorSettings
from workers.supervisor.fleet import Fleet, Look
from workers.supervisor.loading.history import STABLE_S, Death, History
from workers.supervisor.loading.load_watch import LoadWatch, mapped_size
from workers.supervisor.loading.readings import Readings
from workers.supervisor.needs import Needs, bounds_of
from workers.supervisor.output import Console
from workers.supervisor.plan import PlannedWorker, Site, is_served_alike
from workers.supervisor.supervisor import Supervisor

ASKED_LIFE_S = 600.0
"""Seconds for which an admin's wish to load a model is remembered."""
MOST_LOGS = 32
"""Number of models, those that failed last, whose last lines of log are told."""
RESERVE_SHARE = 0.02
"""Share of a device that is left to others."""


@dataclass(slots=True)
class _Resident:
    """A worker that was started here, until its process is gone."""

    worker: PlannedWorker
    shares: tuple[Share, ...]
    since: float
    status: Status = "loading"
    last_used: float = NEVER
    num_running: int = 0
    is_stable: bool = False
    watch: LoadWatch | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The fields of the catalog that concern all of its models together."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    models_max: int = 0

    @classmethod
    def of(cls, found: Catalog) -> Rules:
        return cls(found.groups, found.models_max)


class Residents:
    """The models of one machine that are loaded on demand, and their workers."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        rules: Rules,
        site: Site,
        needs: Needs,
        providers: Sequence[DeviceProvider],
        console: Console,
        load_stall_s: float,
    ) -> None:
        """`load_stall_s`: seconds after which a load that does nothing counts as hung; 0: never."""
        self._site = site
        self._stall_s = load_stall_s
        self._needs = needs
        self._providers = providers
        self._readings = Readings(needs, providers)
        self._console = console
        self._models: dict[str, ModelSpec] = {}
        self._past: dict[str, History] = {}
        self._residents: dict[str, _Resident] = {}
        self._unloaded: frozenset[str] = frozenset()
        self._demand: dict[str, ModelDemand] = {}
        self._asked: dict[str, float] = {}
        self._pids: Mapping[str, int | None] = {}
        """Names of the workers that are kept -> their process ids."""
        self._plan = Plan(())
        self._others = {device.id: _others(device) for device in needs.devices}
        self._changed = asyncio.Event()
        """Set when something happened that is not read from Redis."""
        self.serve(models, rules)

    @property
    def names(self) -> list[str]:
        """The models' names; first those that are kept loaded."""
        return sorted(self._models, key=lambda name: not self._models[name].policy.min)

    def serve(self, models: Sequence[ModelSpec], rules: Rules) -> None:
        """Serve these models from now on. Workers of models that are gone, or have changed, drain."""
        for model in models:
            before = self._models.get(model.name)
            if before is None or not is_served_alike(model, before):
                self._past_of(model.name).forgive()
        self._models, self._rules = {model.name: model for model in models}, rules
        self._needs.models_max = rules.models_max
        self._needs.serve(models)
        self._changed.set()

    def note_death(self, worker: PlannedWorker, death: Death) -> None:
        """Note that a worker's process ended by itself. Its supervisor starts it again, unless its model has failed."""
        resident = self._residents.get(worker.name)
        if resident is None or resident.status == "draining":
            return
        now, past = time.time(), self._past_of(worker.model.name)
        if resident.status == "ready":
            pause_s = past.died_serving(death, now - resident.since, now)
        else:
            pause_s = past.died_loading(death, now)
        if pause_s is not None:
            self._give_up(resident, pause_s)
        elif death.is_final:  # somebody has stopped it: whoever still wants the model gets a new one
            self._dismiss(resident.worker.name, f"its worker ended ({death.reason})", now)
        else:
            resident.status, resident.since, resident.is_stable = "loading", now, False
            if resident.watch is not None:
                resident.watch = resident.watch.again(now)
        self._changed.set()

    async def run(self, supervisor: Supervisor, fleet: Fleet) -> None:
        """Load and unload until cancelled."""
        this = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._needs.run(self._changed)), tasks.create_task(self._readings.run())]
            told_at, marked_at, states = 0.0, 0.0, MachineModels(at=0.0, models={})
            # Redis' client can swallow a cancellation before Python 3.12 (python/cpython#86296), so it is looked for.
            while this is None or not this.cancelling():
                self._changed.clear()
                now = time.time()
                if now - marked_at >= keys.SUPERVISED_INTERVAL_S:
                    marked_at = now if await self._mark(fleet, first=not marked_at) else marked_at
                residents = {each.worker.worker_id: each.worker.model.name for each in self._residents.values()}
                look = await fleet.look(residents)
                if look is not None and marked_at:
                    self._update(look, supervisor, now)
                    self._act(supervisor, now)
                    new = MachineModels(at=now, models=self._states(now))
                    if _besides(new) != _besides(states) or now - told_at >= residency.TOLD_EVERY_S:
                        await fleet.tell(self._site.host, new, self._answered())
                        told_at, states = now, new
                with suppress(TimeoutError):
                    async with asyncio.timeout(residency.LOOK_EVERY_S):
                        await self._changed.wait()
            for task in beside:
                task.cancel()

    async def _mark(self, fleet: Fleet, *, first: bool) -> bool:
        """Mark the models as supervised and read which ones admins have unloaded; return whether Redis answered."""
        found = await fleet.unloaded(sorted(self._models), forget=first)
        if found is None:
            return False
        self._unloaded = found
        return True

    def _update(self, look: Look, supervisor: Supervisor, now: float) -> None:
        """Take in what has become of the workers, and what calls wait for."""
        self._demand = _merged(look)
        self._asked = {
            model: at for model, at in look.asked.items() if model in self._models and abs(now - at) < ASKED_LIFE_S
        }
        for model, at in self._asked.items():
            self._past_of(model).note_asked(at)
        self._needs.want([*self._demand, *self._asked])
        self._pids = supervisor.pids
        self._readings.keep(self._pids.values())
        for name, resident in list(self._residents.items()):
            if resident.status == "draining":
                if name not in self._pids:
                    del self._residents[name]
                continue
            beat = look.beats.get(resident.worker.worker_id)
            if beat is not None and resident.status == "loading":
                resident.status, resident.since = "ready", now
                self._past_of(resident.worker.model.name).note_loaded()
            elif resident.status == "ready" and not resident.is_stable and now - resident.since > STABLE_S:
                resident.is_stable = True
                self._past_of(resident.worker.model.name).note_stable()
            if beat is not None:
                resident.num_running = beat.load.slots_busy + beat.load.waiting
            model = resident.worker.model.name
            told = self._demand.get(model, ModelDemand())
            if self._num_residents(model) == 1:  # a heartbeat may not have a call yet that its gateway has placed
                resident.num_running = max(resident.num_running, told.num_running)
            resident.last_used = max(resident.last_used, told.used_at, now if resident.num_running else NEVER)
            if resident.status == "loading":
                self._watch(resident, supervisor, now)
            elif (pid := self._pids.get(name)) is not None:
                has_served = resident.last_used > resident.since
                self._readings.note(resident.worker, pid, now - resident.since, has_served=has_served)

    def _num_residents(self, model: str) -> int:
        residents = self._residents.values()
        return sum(each.worker.model.name == model and each.status != "draining" for each in residents)

    def _past_of(self, model: str) -> History:
        return self._past.setdefault(model, History(model))

    def _watch(self, resident: _Resident, supervisor: Supervisor, now: float) -> None:
        """Look how far a worker is that loads, and end it if it hangs."""
        if resident.watch is None:
            return
        resident.watch.look(self._pids.get(resident.worker.name), now)
        if why := resident.watch.hung(self._stall_s, now):
            supervisor.give_up(resident.worker.name)
            self._give_up(resident, self._past_of(resident.worker.model.name).failed(Death(None, why), now))

    def _give_up(self, resident: _Resident, pause_s: float) -> None:
        """Have no worker in this place, as its model has failed."""
        model = resident.worker.model.name
        resident.status = "draining"
        failure = self._past_of(model).failure
        why = failure.reason if failure is not None else ""
        self._console.say(f"paddock: {model} did not load ({why}); it is tried again in {pause_s:.0f} s")

    def _act(self, supervisor: Supervisor, now: float) -> None:
        """Decide, and have the supervisor keep what was decided."""
        self._plan = decide(self._picture(now), now)
        for action in self._plan.actions:
            match action:
                case Start():
                    self._start(action, supervisor, now)
                case Stop() | Drain() | Reserve():
                    self._dismiss(action.worker, action.why, now)
        for resident in self._residents.values():
            # Of a model that has left the catalog, or that has other settings now.
            prediction = self._needs.found.get(resident.worker.model.name)
            spec = self._models.get(resident.worker.model.name)
            is_current = spec is not None and is_served_alike(spec, resident.worker.wanted)
            if resident.status != "draining" and not (is_current and prediction is not None):
                self._dismiss(resident.worker.name, "the catalog has changed", now)
        wanted = tuple(each.worker for each in self._residents.values() if each.status != "draining")
        if {worker.name for worker in wanted} != {worker.name for worker in supervisor.wanted}:
            supervisor.want(wanted)

    def _start(self, start: Start, supervisor: Supervisor, now: float) -> None:
        taken = {*supervisor.pids, *self._residents}
        number = next(number for number in count() if f"worker-{number}" not in taken)
        prediction = self._needs.found[start.model]
        gpus = [share.device for share in start.shares if share.device != CPU]
        worker = PlannedWorker(
            name=f"worker-{number}",
            worker_id=f"{self._site.host}-{number}",
            model=prediction.spec,
            wanted=self._models[start.model],
            device=",".join(gpus) or None,
            neighbours=1,
        )
        size = mapped_size(parts(Path(worker.model.path or ""))) if worker.model.llama.use_mmap else 0
        watch = LoadWatch(supervisor.record_of(worker), size, now)
        self._residents[worker.name] = _Resident(worker, start.shares, now, watch=watch)
        self._console.say(f"paddock: {start.model} is loaded: {start.why}")

    def _dismiss(self, name: str, why: str, now: float) -> None:
        resident = self._residents[name]
        model = resident.worker.model.name
        resident.status = "draining"
        self._past_of(model).left_at = now
        self._console.say(f"paddock: {model} leaves: {why}")

    def _picture(self, now: float) -> Picture:
        states = [state for provider in self._providers for state in provider.devices()]
        loadable = [name for name in self._models if name in self._needs.found]
        return Picture(
            machines=(Machine(self._site.host, tuple(self._device(state) for state in states)),),
            models=tuple(self._model(name) for name in loadable),
            workers=tuple(
                self._worker(each) for each in self._residents.values() if each.worker.model.name in loadable
            ),
            demand=tuple(each for each in self._demands() if each.model in loadable),
            failures=tuple(failure for past in self._past.values() if (failure := past.pending(now)) is not None),
            unloaded=frozenset(self._unloaded & {*loadable}),
            groups=self._rules.groups,
            models_max=self._rules.models_max,
        )

    def _device(self, state: DeviceState) -> Device:
        id_ = CPU if state.id == HOST else state.id
        others = self._others.get(state.id, int(RESERVE_SHARE * state.total))
        return Device(id_, state.total, state.free, others, state.is_trusted)

    def _model(self, name: str) -> Model:
        past = self._past_of(name)
        need = self._needs.found[name].need
        return Model(name, self._models[name].policy, need, was_loaded=past.was_loaded, left_at=past.left_at)

    def _worker(self, resident: _Resident) -> Worker:
        return Worker(
            resident.worker.name,
            resident.worker.model.name,
            self._site.host,
            self._shares(resident),
            resident.status,
            resident.since,
            resident.last_used,
            resident.num_running,
            num_taken=int(resident.last_used > resident.since),
        )

    def _shares(self, resident: _Resident) -> tuple[Share, ...]:
        """Return the worker's shares; while it loads, with what main memory has given it so far."""
        pid = self._pids.get(resident.worker.name)
        if resident.status != "loading" or pid is None:
            return resident.shares
        seen = taken_bytes(pid) or 0
        return tuple(replace(share, seen_bytes=seen) if share.device == CPU else share for share in resident.shares)

    def _demands(self) -> Iterator[Demand]:
        for model in sorted({*self._demand, *self._asked}):
            told, asked_at = self._demand.get(model, ModelDemand()), self._asked.get(model)
            if told.num_waiting or asked_at is not None:
                since = min(told.oldest_at if told.num_waiting else asked_at or 0.0, asked_at or told.oldest_at)
                yield Demand(
                    model, told.num_waiting, since, told.predicted_wait_s, is_asked_by_admin=asked_at is not None
                )

    def _answered(self) -> list[str]:
        """Return the models that an admin asked for and that are loaded."""
        loaded = {each.worker.model.name for each in self._residents.values() if each.status == "ready"}
        return sorted(loaded & self._asked.keys())

    def _states(self, now: float) -> dict[str, ModelState]:
        waits = {wait.model: wait for wait in self._plan.waits()}
        logs = sorted((past for past in self._past.values() if past.last), key=lambda past: -past.failed_at)
        told = {past.model for past in logs[:MOST_LOGS]}
        return {model: self._state(model, waits.get(model), now, with_log=model in told) for model in self._models}

    def _state(self, model: str, wait: Wait | None, now: float, *, with_log: bool) -> ModelState:
        residents = [each for each in self._residents.values() if each.worker.model.name == model]
        past, refused = self._past_of(model), self._needs.refused.get(model)
        failure, last = past.pending(now), past.last
        status: ModelStatus = "unloaded"
        if any(each.status == "ready" for each in residents):
            status = "loaded"
        elif any(each.status == "loading" for each in residents):
            status = "loading"
        elif failure is not None or refused:
            status = "failed"
        whys = (refused, failure and failure.reason, wait and wait.why, last and last.reason)
        shares = [each.watch.progress for each in residents if each.status == "loading" and each.watch is not None]
        return ModelState(
            status=status,
            progress=max((share for share in shares if share is not None), default=None),
            why=next((why for why in whys if why), ""),
            is_hopeless=(bool(refused) or (wait is not None and wait.reason in HOPELESS))
            and status not in ("loaded", "loading"),
            retry_at=failure.not_before if failure is not None else 0.0,
            num_failures=past.num_failures,
            exit_code=last.code if last is not None else None,
            log=last.lines if last is not None and with_log else (),
        )


def _besides(told: MachineModels) -> dict[str, ModelState]:
    """Return the models' states without their progress, which changes all the time while one loads."""
    return {name: structs.replace(state, progress=None) for name, state in told.models.items()}


def _others(device: DeviceState) -> int:
    """Return the bytes of a device that others use before any worker runs, and what is left to them."""
    return device.total - device.free + int(RESERVE_SHARE * device.total)


def _merged(look: Look) -> dict[str, ModelDemand]:
    """Return model -> its calls at all gateways together."""
    found: dict[str, ModelDemand] = {}
    for told in look.demand:
        for model, demand in told.models.items():
            known = found.get(model)
            found[model] = demand if known is None else _sum(known, demand)
    return found


def _sum(one: ModelDemand, other: ModelDemand) -> ModelDemand:
    oldest = [each.oldest_at for each in (one, other) if each.num_waiting]
    return ModelDemand(
        num_waiting=one.num_waiting + other.num_waiting,
        oldest_at=min(oldest, default=0.0),
        predicted_wait_s=max(one.predicted_wait_s, other.predicted_wait_s),
        num_running=one.num_running + other.num_running,
        used_at=max(one.used_at, other.used_at),
    )


def residents_of(
    found: Catalog, models: Sequence[ModelSpec], settings: SupervisorSettings, site: Site, console: Console
) -> Residents | None:
    """Return what loads a catalog's models on demand; None: none of them has `residency`, so all run from the start.
    `models`: with their files."""
    if all(model.residency is None for model in models):
        return None
    sources = providers()
    states = [state for provider in sources for state in provider.devices()]
    needs = Needs(Learned(settings.state_dir / FILE), bounds_of(settings), states, site.cores)
    return Residents(models, Rules.of(found), site, needs, sources, console, settings.load_stall_s)
