"""Loads this machine's models on demand: describes the machine for the planner, and carries out what that orders.

One of the machines on a Redis plans for all (`workers.planner`); it may be this one. What a worker does is told by its
heartbeats; what is free, by the devices. Without orders, and while Redis is away, nothing is loaded and nothing leaves.
Times are unix seconds by this machine's clock.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from workers.footprint.devices import HOST, DeviceProvider, DeviceState, providers
from workers.footprint.learned import FILE, Learned, files_of
from workers.footprint.taken import taken_bytes
from workers.models.catalog import Catalog
from workers.models.files import parts
from workers.models.spec import ModelSpec
from workers.planner.coordinator import Coordinator
from workers.planner.exchange import Look
from workers.planner.merge import worker_of
from workers.planner.messages import (
    MachineCatalog,
    MachineOrders,
    MachineReport,
    StartOrder,
    ToldFailure,
    ToldModel,
    ToldWait,
    ToldWorker,
)
from workers.protocol import residency
from workers.protocol.residency import MachineModels, ModelDemand, ModelState, Why
from workers.redis.trouble import raise_if_cancelled
from workers.residency.ledger import free_bytes
from workers.residency.picture import CPU, NEVER, Device, Failure, Share, Worker
from workers.residency.policy import Group
from workers.residency.scene import gib
from workers.settings import SupervisorSettings
from workers.supervisor.fleet import Fleet
from workers.supervisor.loading.history import STABLE_S, Death, History
from workers.supervisor.loading.keepers import Keepers
from workers.supervisor.loading.load_watch import LoadWatch, mapped_size
from workers.supervisor.loading.model_state import Refused, state_of
from workers.supervisor.loading.readings import Readings
from workers.supervisor.loading.resident import Resident, WallClock
from workers.supervisor.needs import Needs, bounds_of, memory_of
from workers.supervisor.output import Console
from workers.supervisor.plan import PlannedWorker, Site, is_served_alike
from workers.supervisor.supervisor import Supervisor

MOST_LOGS = 32
"""Number of models, those that failed last, whose last lines of log are told."""
SETTLE_S = 0.5
"""Seconds for which a reserved worker may still get a call whose slot was given to it before."""
TOLD_AGAIN_S = 1.0
"""Seconds after which a worker is told again whether it is reserved, if its heartbeats do not say so yet."""
REFUSED_PAUSE_S = 2.0
"""Seconds after which a model may be ordered again whose memory was not free."""
START_TIMEOUT_S = 30.0
"""Seconds after which a worker without a process counts as one that can't be started: its disk is full, say."""
RESERVE_SHARE = 0.02
"""Share of a device that is left to others."""


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
        self._keepers = Keepers(console.say)
        self._console = console
        self._models: dict[str, ModelSpec] = {}
        self._past: dict[str, History] = {}
        self._residents: dict[str, Resident] = {}
        self._boot = secrets.token_hex(8)
        self._fence, self._done = 0, 0
        """The highest number of a planner that was heard of, and of its orders to start that were dealt with."""
        self._waits: tuple[float, float, Mapping[str, ToldWait]] = (0.0, 0.0, {})
        """The date of the latest orders, when they were first read, and what they say of models that wait."""
        self._devices: tuple[Device, ...] = ()
        self._catalog = MachineCatalog(models={})
        self._others = {device.id: _others(device) for device in needs.devices}
        self._clock = WallClock()
        self._changed = asyncio.Event()
        """Set when something happened that is not read from Redis."""
        self.serve(models, rules)

    @property
    def names(self) -> list[str]:
        """The models' names; first those that are kept loaded."""
        return sorted(self._models, key=lambda name: not self._models[name].policy.min)

    def serve(self, models: Sequence[ModelSpec], rules: Rules) -> None:
        """Serve these models from now on. Workers of models that are gone drain; those of models that have changed are
        replaced."""
        for model in models:
            before = self._models.get(model.name)
            if before is None or not is_served_alike(model, before):
                self._past_of(model.name).forgive()
                self._keepers.end(model.name, "its settings have changed")
        self._models, self._rules = {model.name: model for model in models}, rules
        self._needs.serve(models, rules.models_max)
        self._changed.set()

    def note_death(self, worker: PlannedWorker, death: Death) -> None:
        """Note that a worker's process ended by itself. Its supervisor starts it again, unless its model has failed."""
        resident = self._residents.get(worker.name)
        if resident is None or resident.status == "draining":
            return
        model = worker.model.name
        now, past = time.time(), self._past_of(model)
        self._changed.set()
        if resident.status == "reserved":  # it has no calls any more, and was to leave without them
            resident.status = "draining"
            return
        if resident.status == "ready" and model in self._needs.found and not self._needs.holds(model):
            self._dismiss(worker.name, death.why if death.found else Why.of("its file has changed"), now)
            return
        if death.is_drain:
            pause_s = None
        elif resident.status == "ready":
            pause_s = past.died_serving(death, now - resident.since, now)
        else:
            pause_s = past.died_loading(death, now)
        if pause_s is not None:
            self._give_up(resident, pause_s)
        elif death.is_final:  # somebody has stopped it: whoever still wants the model gets a new one
            self._dismiss(resident.worker.name, Why.of("its worker ended: ", *death.why.parts), now)
        else:
            resident.status, resident.since, resident.is_stable = "loading", now, False
            if resident.watch is not None:
                resident.watch = resident.watch.again(now)

    def wake(self) -> None:
        """Decide soon: a worker that was to leave is gone."""
        self._changed.set()

    async def run(self, supervisor: Supervisor, fleet: Fleet) -> None:
        """Load and unload until cancelled."""
        coordinator = Coordinator(fleet.client, self._site.host, partial(fleet.unloaded, forget=False))
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._needs.run(self._changed)),
                tasks.create_task(self._readings.run()),
                tasks.create_task(coordinator.listen(self._changed.set)),
            ]
            try:
                await self._keep(supervisor, fleet, coordinator)
            finally:
                for task in beside:
                    task.cancel()
                self._keepers.close()
                await coordinator.leave()

    async def _keep(self, supervisor: Supervisor, fleet: Fleet, coordinator: Coordinator) -> None:
        """Follow the planner's orders, and plan while this machine is the one that does."""
        is_ready = False
        while True:
            raise_if_cancelled()
            self._changed.clear()
            if moved_s := self._clock.moved_s():
                self._move_times(moved_s)
            now = time.time()
            is_ready = is_ready or await self._begin(fleet, coordinator)
            residents = {each.worker.worker_id: each.worker.model.name for each in self._residents.values()}
            look = await coordinator.look(residents, now)
            if look is not None and is_ready:
                self._update(look, coordinator.demand(), supervisor, now)
                report, catalog = self._report(now, is_leaving=supervisor.is_stopping), self._described()
                orders = await coordinator.orders(report, catalog, now)
                self._follow(orders, supervisor, now)
                self._arrange(supervisor, now)
                report = self._report(now, is_leaving=supervisor.is_stopping)
                states = MachineModels(at=now, models=self._states(now), wanted=dict(coordinator.wanted))
                await coordinator.tell(report, catalog, states)
            with suppress(TimeoutError):
                is_moving = any(each.status != "ready" for each in self._residents.values())
                often = coordinator.is_planner or is_moving
                async with asyncio.timeout(residency.LOOK_EVERY_S if often else residency.TOLD_EVERY_S):
                    await self._changed.wait()

    async def _begin(self, fleet: Fleet, coordinator: Coordinator) -> bool:
        """Take back what admins have unloaded, unless other machines are there already; return whether Redis
        answered."""
        others = await coordinator.others_at_start()
        if others is None:
            return False
        return bool(others) or await fleet.unloaded(sorted(self._models), forget=True) is not None

    def _move_times(self, by_s: float) -> None:
        """Set what was noted by the wall clock as if that had always been as it is now."""
        for one in self._residents.values():
            one.since, one.last_used = one.since + by_s, one.last_used + by_s
            one.told_at, one.settles_at = one.told_at + by_s, one.settles_at + by_s
        for past in self._past.values():
            past.left_at, past.failed_at = past.left_at + by_s, past.failed_at + by_s
            past.failure, past.refusal = _moved(past.failure, by_s), _moved(past.refusal, by_s)

    def _update(self, look: Look, demand: Mapping[str, ModelDemand], supervisor: Supervisor, now: float) -> None:
        """Take in what has become of the workers, and what calls wait for."""
        for model in look.asked.keys() & self._models.keys():
            self._past_of(model).note_asked(look.asked[model])
        self._needs.want([*demand, *look.asked])
        self._keepers.look()
        self._devices = tuple(map(self._device, self._devices_now()))
        self._tend_sleepers()
        pids = supervisor.pids
        self._readings.keep(pids.values())
        for name, resident in list(self._residents.items()):
            if resident.status == "draining":
                if name not in pids:
                    del self._residents[name]
                    self._sleep(resident)
                continue
            beat = look.beats.get(resident.worker.worker_id)
            if beat is not None and resident.status == "loading":
                resident.status, resident.since, resident.load_s = "ready", now, max(0.0, now - resident.since)
                self._past_of(resident.worker.model.name).note_loaded()
                self._keepers.end(resident.model, "it is loaded")
            elif resident.status == "ready" and not resident.is_stable and now - resident.since > STABLE_S:
                resident.is_stable = True
                self._past_of(resident.worker.model.name).note_stable()
            if beat is not None:
                resident.num_running = beat.load.slots_busy + beat.load.waiting
                if beat.reserved and not resident.is_told_reserved:
                    resident.settles_at = now + SETTLE_S
                resident.is_told_reserved = beat.reserved
                # An old heartbeat says nothing of now: the worker would seem to be used later than another one was.
                if resident.num_running and beat != resident.beat:
                    resident.last_used = max(resident.last_used, now)
                resident.beat = beat
            self._measure(resident, pids.get(name), supervisor, now)

    def _measure(self, resident: Resident, pid: int | None, supervisor: Supervisor, now: float) -> None:
        """Look how far a worker is that loads, and end it if it hangs; have the memory of others read now and then."""
        if resident.status != "loading":
            if pid is not None:
                has_served = resident.last_used > resident.since
                self._readings.note(resident.worker, pid, now - resident.since, has_served=has_served)
            return
        resident.seen_bytes = (taken_bytes(pid) or 0) if pid is not None else 0
        past = self._past_of(resident.worker.model.name)
        if pid is None and now - resident.since > START_TIMEOUT_S:
            death = Death(None, "its process can't be started; the supervisor's log says why")
            self._give_up(resident, past.failed(death, now))
            return
        if resident.watch is None:
            return
        resident.watch.look(pid, now)
        if why := resident.watch.hung(self._stall_s, now):
            supervisor.give_up(resident.worker.name)
            self._give_up(resident, past.failed(Death(None, why), now))

    def _past_of(self, model: str) -> History:
        return self._past.setdefault(model, History(model))

    def _give_up(self, resident: Resident, pause_s: float) -> None:
        """Have no worker in this place, as its model has failed."""
        model = resident.worker.model.name
        resident.status = "draining"
        failure = self._past_of(model).failure
        why = failure.why.whole if failure is not None else ""
        self._console.say(f"paddock: {model} did not load ({why}); it is tried again in {pause_s:.0f} s")

    def _follow(self, orders: MachineOrders | None, supervisor: Supervisor, now: float) -> None:
        """Carry out what is ordered, unless it is of a planner that another one has taken the place of, or was meant
        for an earlier start of this supervisor."""
        if orders is None or orders.fence < self._fence or orders.boot != self._boot:
            return
        if orders.fence > self._fence:
            self._fence, self._done = orders.fence, 0
        clock = time.monotonic()
        self._waits = (orders.at, clock if orders.at != self._waits[0] else self._waits[1], orders.waits)
        for model in orders.forgotten:
            self._keepers.end(model, "an admin has unloaded it")
        for start in orders.starts:
            if start.number > self._done:
                if self._makes_room(start):
                    break  # it is told again
                self._done = start.number
                self._start(start, supervisor, now)
        for resident in self._residents.values():
            if (why := orders.leaving.get(resident.id)) and resident.status != "draining":
                resident.sleeps = resident.id in orders.sleeping
                self._dismiss(resident.worker.name, why, now)
            elif (why := orders.reserved.get(resident.id)) and resident.status == "ready":
                self._reserve(resident, why, now, is_reserved=True)
            elif (why := orders.released.get(resident.id)) and resident.status == "reserved":
                self._reserve(resident, why, now, is_reserved=False)
                resident.released_at = now

    def _arrange(self, supervisor: Supervisor, now: float) -> None:
        """Have the supervisor keep the workers that should run."""
        for resident in self._residents.values():
            model = resident.worker.model.name
            if resident.status != "draining" and model not in self._models:
                self._dismiss(resident.worker.name, Why.of("the catalog does not have ", (model,), " any more"), now)
        self._tell_reserved(supervisor, now)
        wanted = tuple(each.worker for each in self._residents.values() if each.status != "draining")
        if {worker.name for worker in wanted} != {worker.name for worker in supervisor.wanted}:
            supervisor.want(wanted)

    def _start(self, start: StartOrder, supervisor: Supervisor, now: float) -> None:
        """Start a worker, or refuse to: what the planner knew can be a second old."""
        if why := self._hindrance(start):
            self._past_of(start.model).refusal = Failure(start.model, now + REFUSED_PAUSE_S, Why.of(why))
            self._console.say(f"paddock: {start.model} is not loaded: {why}")
            return
        taken = {*supervisor.pids, *(each.worker.name for each in self._residents.values())}
        number = next(number for number in count() if f"worker-{number}" not in taken)
        prediction = self._needs.found[start.model]
        gpus = [share.device for share in start.shares if share.device != CPU]
        worker = PlannedWorker(
            name=f"worker-{number}",
            worker_id=f"{self._site.host}-{number}",
            model=prediction.spec,
            wanted=prediction.wanted,
            device=",".join(gpus) or None,
            neighbours=1,
        )
        size = mapped_size(parts(Path(worker.model.path or ""))) if worker.model.llama.use_mmap else 0
        watch = LoadWatch(supervisor.record_of(worker), size, now)
        self._residents[worker.name] = Resident(
            start.worker, worker, start.shares, now, replaces=start.replaces, watch=watch
        )
        self._console.say(f"paddock: {start.model} is loaded: {start.why.whole}")

    def _host_room(self, but: str = "") -> int:
        """Return the bytes of main memory that a worker may take as long as all sleeping models sleep on, but this one
        whose pages it uses."""
        host = next((device for device in self._devices if device.id == CPU), None)
        if host is None:
            return 0
        used = {but, *(each.model for each in self._residents.values() if each.status == "loading" and each.maps_files)}
        return free_bytes(host, self._held_of(CPU)) - self._keepers.taken_bytes(used)

    def _held_of(self, device: str) -> list[tuple[Worker, Share]]:
        """Return the workers that take a part of a device, each with that part."""
        workers = [worker_of(self._told(each), self._site.host, 0.0) for each in self._residents.values()]
        return [(each, part) for each in workers for part in each.shares if part.device == device]

    def _sleep(self, resident: Resident) -> None:
        """Keep the weights of a model whose last worker has just left in main memory, if they are to stay and fit."""
        model = resident.model
        is_there = any(each.model == model for each in self._residents.values())
        if not resident.sleeps or is_there or model not in self._models or not self._needs.holds(model):
            return
        files = [*files_of(resident.worker.model)]
        size, room = mapped_size(files), self._host_room()
        if size > room:
            least = f"they take {gib(size)}, and {gib(max(0, room))} are free"
            self._console.say(f"paddock: the weights of {model} are not kept in memory: {least}")
        elif size:
            self._keepers.start(model, files, size, is_shared=resident.maps_files)
            self._console.say(f"paddock: {model} sleeps; its weights ({gib(size)}) are kept in memory")

    def _tend_sleepers(self) -> None:
        """Keep no weights that nobody could load any more, or whose memory others need."""
        for model in self._keepers.models:
            if model not in self._models:
                self._keepers.end(model, "the catalog does not have it any more")
            elif model in self._needs.found and not self._needs.holds(model):
                self._keepers.end(model, "its file has changed")
        is_moving = self._keepers.is_ending or self._keepers.is_reading
        if self._keepers.models and not is_moving and self._host_room() < 0:
            self._keepers.end_first("others need the memory")

    def _makes_room(self, start: StartOrder) -> bool:
        """End keepers of sleeping models in whose memory a worker is to be loaded. Return whether that takes a
        moment."""
        need = sum(share.bytes for share in start.shares if share.device == CPU)
        prediction = self._needs.found.get(start.model)
        if not need or prediction is None:
            return False
        is_shared = prediction.spec.llama.use_mmap and all(share.device == CPU for share in start.shares)
        while need > self._host_room(start.model if is_shared else "") and not self._keepers.is_ending:
            if not self._keepers.end_first(f"{start.model} is loaded", but=start.model):
                break
        return self._keepers.is_ending

    def _hindrance(self, start: StartOrder) -> str:
        """Return why a worker can't be started now; empty: it can."""
        if start.model not in self._models or start.model not in self._needs.found:
            return "the catalog of this machine does not have it any more"
        if not self._needs.holds(start.model):
            return "its file has changed, and its memory is predicted anew"
        for share in start.shares:
            device = next((each for each in self._devices if each.id == share.device), None)
            if device is None:
                return f"this machine has no {share.device}"
            free = free_bytes(device, self._held_of(share.device))
            if share.bytes > free:
                return f"it takes {gib(share.bytes)} of {share.device}, and {gib(max(0, free))} are free by now"
        return ""

    def _dismiss(self, name: str, why: Why, now: float) -> None:
        resident = self._residents[name]
        model = resident.worker.model.name
        resident.status = "draining"
        if all(each.worker.model.name != model or each.status == "draining" for each in self._residents.values()):
            self._past_of(model).left_at = now
        self._console.say(f"paddock: {name} of {model} leaves: {why.whole}")

    def _reserve(self, resident: Resident, why: Why, now: float, *, is_reserved: bool) -> None:
        resident.status, resident.told_at = "reserved" if is_reserved else "ready", NEVER
        resident.settles_at = math.inf if is_reserved and not resident.is_told_reserved else now + SETTLE_S
        calls = "no more calls" if is_reserved else "calls again"
        self._console.say(f"paddock: {resident.worker.name} of {resident.worker.model.name} gets {calls}: {why.whole}")

    def _tell_reserved(self, supervisor: Supervisor, now: float) -> None:
        """Tell workers whether they are reserved, until their heartbeats say so."""
        for resident in self._residents.values():
            is_reserved = resident.status == "reserved"
            is_due = resident.is_told_reserved != is_reserved and now - resident.told_at > TOLD_AGAIN_S
            if is_due and resident.status in ("ready", "reserved"):
                resident.told_at = now
                supervisor.reserve(resident.worker.name, is_reserved)

    def _report(self, now: float, *, is_leaving: bool) -> MachineReport:
        """Return what the planner is told of this machine."""
        failures = {model: failure for model, past in self._past.items() if (failure := past.blocked(now))}
        return MachineReport(
            at=now,
            boot=self._boot,
            fence=self._fence,
            done=self._done,
            devices=self._devices,
            is_leaving=is_leaving,
            workers=tuple(map(self._told, self._residents.values())),
            failures={model: ToldFailure(not_before=each.not_before, why=each.why) for model, each in failures.items()},
            loaded=tuple(model for model, past in self._past.items() if past.was_loaded),
            asleep=self._keepers.models,
            left={model: past.left_at for model, past in self._past.items() if past.left_at != NEVER},
        )

    def _described(self) -> MachineCatalog:
        """Return what the planner is told of this machine's models; the same object until that changes."""
        told = MachineCatalog(
            models={name: self._told_model(name, spec) for name, spec in self._models.items()},
            groups=dict(self._rules.groups),
            models_max=self._rules.models_max,
        )
        if told != self._catalog:
            self._catalog = told
        return self._catalog

    def _told_model(self, name: str, spec: ModelSpec) -> ToldModel:
        """Return a model as the planner is told of it. One whose new settings can't be loaded, or are not known to be
        loadable yet, has the need of its workers with the old ones."""
        if name in self._needs.found:
            found = self._needs.found[name]
            return ToldModel(policy=spec.policy, need=found.need, memory=memory_of(found))
        old = self._needs.outdated.get(name)
        if old is not None and any(each.worker.model.name == name for each in self._residents.values()):
            return ToldModel(policy=spec.policy, need=old.need, is_outdated=True)
        return ToldModel(policy=spec.policy)

    def _devices_now(self) -> list[DeviceState]:
        """Return the devices as they are now. One that can't be read just now counts as it was, with workers' memory
        as the only memory in use: whoever waits for it is not told that the machine has none."""
        read = {state.id: state for provider in self._providers for state in provider.devices()}
        if (host := read.get(HOST)) is not None:  # sleeping models leave for whoever needs their memory
            read[HOST] = replace(host, free=min(host.total, host.free + self._keepers.locked_bytes))
        if not self._residents:  # what is in use now is others', and may be less than at the start
            for state in read.values():
                self._others[state.id] = min(_others(state), self._others.get(state.id, state.total))
        unread = [replace(known, is_trusted=False) for known in self._needs.devices if known.id not in read]
        return [*read.values(), *unread]

    def _device(self, state: DeviceState) -> Device:
        id_ = CPU if state.id == HOST else state.id
        others = self._others.get(state.id, int(RESERVE_SHARE * state.total))
        return Device(id_, state.total, state.free, others, state.is_trusted)

    def _told(self, resident: Resident) -> ToldWorker:
        return ToldWorker(
            id=resident.id,
            name=resident.worker.worker_id,
            model=resident.worker.model.name,
            shares=self._shares(resident),
            status=resident.status,
            since=resident.since,
            last_used=resident.last_used if resident.last_used != NEVER else 0.0,
            num_running=resident.num_running,
            is_settling=resident.status == "reserved" and time.time() < resident.settles_at,
            is_stale=self._is_stale(resident),
            replaces=resident.replaces,
            load_s=resident.load_s,
            released_at=resident.released_at,
        )

    def _is_stale(self, resident: Resident) -> bool:
        """Return whether a worker has other settings than its model, with which that can be loaded."""
        prediction = self._needs.found.get(resident.worker.model.name)
        return prediction is not None and not is_served_alike(prediction.wanted, resident.worker.wanted)

    def _shares(self, resident: Resident) -> tuple[Share, ...]:
        """Return the worker's shares; while it loads, with what main memory has given it so far."""
        if resident.status != "loading":
            return resident.shares
        seen = resident.seen_bytes
        return tuple(replace(share, seen_bytes=seen) if share.device == CPU else share for share in resident.shares)

    def _states(self, now: float) -> dict[str, ModelState]:
        _, read_at, waits = self._waits
        if time.monotonic() - read_at > residency.LIFE_S:
            waits = {}
        logs = sorted((past for past in self._past.values() if past.last), key=lambda past: -past.failed_at)
        told = {past.model for past in logs[:MOST_LOGS]}
        return {model: self._state(model, waits.get(model), now, with_log=model in told) for model in self._models}

    def _state(self, model: str, wait: ToldWait | None, now: float, *, with_log: bool) -> ModelState:
        residents = [each for each in self._residents.values() if each.worker.model.name == model]
        shares = [each.watch.progress for each in residents if each.status == "loading" and each.watch is not None]
        return state_of(
            model,
            {each.status for each in residents},
            max((share for share in shares if share is not None), default=None),
            self._past_of(model),
            Refused(self._needs.refused.get(model, Why()), self._needs.retry_at.get(model, 0.0)),
            wait,
            now,
            kept_bytes=self._keepers.size_of(model),
            needs_admin=self._needs_admin(model),
            with_log=with_log,
        )

    def _needs_admin(self, model: str) -> bool:
        """Return whether no call loads the model, nor does anything else but an admin."""
        policy = self._models[model].policy
        group = self._rules.groups.get(policy.group) if policy.group is not None else None
        companions = {model}
        if group is not None and group.together:
            companions = {name for name, spec in self._models.items() if spec.policy.group == policy.group}
        is_due = policy.preload and not self._past_of(model).was_loaded
        is_there = any(each.worker.model.name in companions for each in self._residents.values())
        return not (policy.autoload or policy.min or is_due or is_there)


def _others(device: DeviceState) -> int:
    """Return the bytes of a device that others use before any worker runs, and what is left to them."""
    return device.total - device.free + int(RESERVE_SHARE * device.total)


def _moved(failure: Failure | None, by_s: float) -> Failure | None:
    return None if failure is None else replace(failure, not_before=failure.not_before + by_s)


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
