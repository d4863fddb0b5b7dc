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

from workers.footprint.devices import HOST, DeviceProvider, DeviceState, providers
from workers.footprint.learned import FILE, Learned
from workers.footprint.taken import taken_bytes
from workers.models.catalog import Catalog
from workers.models.spec import ModelSpec
from workers.protocol import keys, residency
from workers.protocol.residency import MachineModels, ModelDemand, ModelState, ModelStatus
from workers.residency.decide import decide
from workers.residency.picture import (
    CPU,
    NEVER,
    Demand,
    Device,
    Failure,
    Machine,
    Model,
    Picture,
    Share,
    Status,
    Worker,
)
from workers.residency.plan import HOPELESS, Drain, Plan, Reserve, Start, Stop
from workers.residency.policy import Group
from workers.settings import SupervisorSettings
from workers.supervisor.fleet import Fleet, Look
from workers.supervisor.needs import Needs, bounds_of
from workers.supervisor.output import Console
from workers.supervisor.plan import PlannedWorker, Site, is_served_alike
from workers.supervisor.supervisor import Supervisor

ASKED_LIFE_S = 600.0
"""Seconds for which an admin's wish to load a model is remembered."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Seconds after which a model that failed to load is tried again; each further time it is twice as long."""
LOAD_TIMEOUT_S = 1800.0
"""Seconds after which a worker that does not register counts as hung."""
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


@dataclass(slots=True)
class _Past:
    """The history of a model, which outlives its workers."""

    was_loaded: bool = False
    left_at: float = NEVER
    num_failures: int = 0
    failure: Failure | None = None


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
    ) -> None:
        self._site = site
        self._needs = needs
        self._providers = providers
        self._console = console
        self._models: dict[str, ModelSpec] = {}
        self._past: dict[str, _Past] = {}
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
        self._models, self._rules = {model.name: model for model in models}, rules
        self._needs.models_max = rules.models_max
        self._needs.serve(models)
        self._changed.set()

    def note_death(self, worker: PlannedWorker, why: str) -> None:
        """Note that a worker's process ended by itself. One that has served is started again by its supervisor."""
        resident = self._residents.get(worker.name)
        if resident is None or resident.status == "draining":
            return
        now = time.time()
        if resident.status == "ready":
            resident.status, resident.since = "loading", now
        else:
            self._fail(resident, why, now)
        self._changed.set()

    def wake(self) -> None:
        """Decide soon: a worker that was to leave is gone."""
        self._changed.set()

    async def run(self, supervisor: Supervisor, fleet: Fleet) -> None:
        """Load and unload until cancelled."""
        this = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            predicting = tasks.create_task(self._needs.run(self._changed))
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
                    if new.models != states.models or now - told_at >= residency.TOLD_EVERY_S:
                        await fleet.tell(self._site.host, new, self._answered())
                        told_at, states = now, new
                with suppress(TimeoutError):
                    async with asyncio.timeout(residency.LOOK_EVERY_S):
                        await self._changed.wait()
            predicting.cancel()

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
        self._needs.want([*self._demand, *self._asked])
        self._pids = supervisor.pids
        for name, resident in list(self._residents.items()):
            if resident.status == "draining":
                if name not in self._pids:
                    del self._residents[name]
                continue
            beat = look.beats.get(resident.worker.worker_id)
            if beat is not None and resident.status == "loading":
                resident.status, resident.since = "ready", now
                self._note_loaded(resident.worker.model.name)
            if beat is not None:
                resident.num_running = beat.load.slots_busy + beat.load.waiting
            model = resident.worker.model.name
            told = self._demand.get(model, ModelDemand())
            if self._num_residents(model) == 1:  # a heartbeat may not have a call yet that its gateway has placed
                resident.num_running = max(resident.num_running, told.num_running)
            resident.last_used = max(resident.last_used, told.used_at, now if resident.num_running else NEVER)
            if resident.status == "loading" and now - resident.since > LOAD_TIMEOUT_S:
                self._fail(resident, f"it did not register within {LOAD_TIMEOUT_S:g} s", now)

    def _num_residents(self, model: str) -> int:
        residents = self._residents.values()
        return sum(each.worker.model.name == model and each.status != "draining" for each in residents)

    def _note_loaded(self, model: str) -> None:
        past = self._past_of(model)
        past.was_loaded, past.num_failures, past.failure = True, 0, None

    def _past_of(self, model: str) -> _Past:
        return self._past.setdefault(model, _Past())

    def _fail(self, resident: _Resident, why: str, now: float) -> None:
        model = resident.worker.model.name
        past = self._past_of(model)
        pause_s = min(FIRST_PAUSE_S * 2**past.num_failures, LONGEST_PAUSE_S)
        past.num_failures, past.failure = past.num_failures + 1, Failure(model, now + pause_s, why)
        resident.status = "draining"
        self._console.say(f"paddock: {model} did not load ({why}); it is tried again in {pause_s:g} s")

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
        self._residents[worker.name] = _Resident(worker, start.shares, now)
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
            failures=tuple(
                past.failure
                for past in self._past.values()
                if past.failure is not None and past.failure.not_before > now
            ),
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
        statuses: dict[str, set[Status]] = {}
        for resident in self._residents.values():
            statuses.setdefault(resident.worker.model.name, set()).add(resident.status)
        waits = {wait.model: wait for wait in self._plan.waits()}
        found: dict[str, ModelState] = {}
        for model in self._models:
            past = self._past.get(model)
            failure = past.failure if past is not None and past.failure and past.failure.not_before > now else None
            status: ModelStatus = "unloaded"
            if "ready" in statuses.get(model, ()):
                status = "loaded"
            elif "loading" in statuses.get(model, ()):
                status = "loading"
            elif failure is not None or model in self._needs.refused:
                status = "failed"
            wait = waits.get(model)
            why = self._needs.refused.get(model) or (failure.reason if failure is not None else "")
            hopeless = model in self._needs.refused or (wait is not None and wait.reason in HOPELESS)
            found[model] = ModelState(
                status=status,
                why=why or (wait.why if wait is not None else ""),
                is_hopeless=hopeless and status not in ("loaded", "loading"),
                retry_at=failure.not_before if failure is not None else 0.0,
            )
        return found


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
    return Residents(models, Rules.of(found), site, needs, sources, console)
