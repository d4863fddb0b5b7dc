"""Loads this machine's models on demand: notes what becomes of their workers, and carries out what the planner orders.

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
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from workers.footprint.devices import DeviceProvider, providers
from workers.footprint.learned import FILE, Learned
from workers.footprint.taken import taken_bytes
from workers.models.catalog import Catalog
from workers.models.files import parts
from workers.models.spec import ModelSpec
from workers.planner.coordinator import Coordinator
from workers.planner.exchange import Look
from workers.planner.messages import MachineOrders, MachineReport, StartOrder
from workers.protocol import residency
from workers.protocol.residency import MachineModels, ModelDemand, Why
from workers.redis.trouble import raise_if_cancelled
from workers.residency.picture import CPU, NEVER, Failure
from workers.residency.scene import gib
from workers.settings import SupervisorSettings
from workers.supervisor.fleet import Fleet
from workers.supervisor.loading.history import STABLE_S, Death
from workers.supervisor.loading.inventory import Inventory, Rules
from workers.supervisor.loading.keepers import Keepers
from workers.supervisor.loading.load_watch import LoadWatch, mapped_size
from workers.supervisor.loading.readings import Readings
from workers.supervisor.loading.reports import Reports
from workers.supervisor.loading.resident import Resident, WallClock
from workers.supervisor.loading.sleepers import Sleepers
from workers.supervisor.needs import Needs, bounds_of
from workers.supervisor.output import Console
from workers.supervisor.plan import PlannedWorker, Site, is_served_alike
from workers.supervisor.supervisor import Supervisor

SETTLE_S = 0.5
"""Seconds for which a reserved worker may still get a call whose slot was given to it before."""
TOLD_AGAIN_S = 1.0
"""Seconds after which a worker is told again whether it is reserved, if its heartbeats do not say so yet."""
REFUSED_PAUSE_S = 2.0
"""Seconds after which a model may be ordered again whose memory was not free."""
START_TIMEOUT_S = 30.0
"""Seconds after which a worker without a process counts as one that can't be started: its disk is full, say."""


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
        self._readings = Readings(needs, providers)
        self._inventory = Inventory(site.host, needs, providers)
        self._keepers = Keepers(console.say)
        self._sleepers = Sleepers(self._inventory, self._keepers, console.say)
        self._reports = Reports(self._inventory, self._keepers)
        self._console = console
        self._boot = secrets.token_hex(8)
        self._fence, self._done = 0, 0
        """The highest number of a planner that was heard of, and of its orders to start that were dealt with."""
        self._clock = WallClock()
        self._changed = asyncio.Event()
        """Set when something happened that is not read from Redis."""
        self.serve(models, rules)

    @property
    def names(self) -> list[str]:
        """The models' names; first those that are kept loaded."""
        return sorted(self._inventory.models, key=lambda name: not self._inventory.models[name].policy.min)

    def serve(self, models: Sequence[ModelSpec], rules: Rules) -> None:
        """Serve these models from now on. Workers of models that are gone drain; those of models that have changed are
        replaced."""
        for model in models:
            before = self._inventory.models.get(model.name)
            if before is None or not is_served_alike(model, before):
                self._inventory.past_of(model.name).forgive()
                self._keepers.end(model.name, "its settings have changed")
        self._inventory.models, self._inventory.rules = {model.name: model for model in models}, rules
        self._needs.serve(models, rules.models_max)
        self._changed.set()

    def note_death(self, worker: PlannedWorker, death: Death) -> None:
        """Note that a worker's process ended by itself. Its supervisor starts it again, unless its model has failed."""
        resident = self._inventory.residents.get(worker.name)
        if resident is None or resident.status == "draining":
            return
        model = worker.model.name
        now, past = time.time(), self._inventory.past_of(model)
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
            residents = {each.worker.worker_id: each.model for each in self._inventory.residents.values()}
            look = await coordinator.look(residents, now)
            if look is not None and is_ready:
                self._update(look, coordinator.demand(), supervisor, now)
                report, catalog = self._report(supervisor, now), self._reports.catalog()
                orders = await coordinator.orders(report, catalog, now)
                self._follow(orders, supervisor, now)
                self._arrange(supervisor, now)
                report = self._report(supervisor, now)
                states = MachineModels(at=now, models=self._reports.states(now), wanted=dict(coordinator.wanted))
                await coordinator.tell(report, catalog, states)
            with suppress(TimeoutError):
                is_moving = any(each.status != "ready" for each in self._inventory.residents.values())
                often = coordinator.is_planner or is_moving
                async with asyncio.timeout(residency.LOOK_EVERY_S if often else residency.TOLD_EVERY_S):
                    await self._changed.wait()

    async def _begin(self, fleet: Fleet, coordinator: Coordinator) -> bool:
        """Take back what admins have unloaded, unless other machines are there already; return whether Redis
        answered."""
        others = await coordinator.others_at_start()
        if others is None:
            return False
        return bool(others) or await fleet.unloaded(sorted(self._inventory.models), forget=True) is not None

    def _move_times(self, by_s: float) -> None:
        """Set what was noted by the wall clock as if that had always been as it is now."""
        for one in self._inventory.residents.values():
            one.since, one.last_used = one.since + by_s, one.last_used + by_s
            one.told_at, one.settles_at = one.told_at + by_s, one.settles_at + by_s
        for past in self._inventory.past.values():
            past.left_at, past.failed_at = past.left_at + by_s, past.failed_at + by_s
            past.failure, past.refusal = _moved(past.failure, by_s), _moved(past.refusal, by_s)

    def _update(self, look: Look, demand: Mapping[str, ModelDemand], supervisor: Supervisor, now: float) -> None:
        """Take in what has become of the workers, and what calls wait for."""
        for model in look.asked.keys() & self._inventory.models.keys():
            self._inventory.past_of(model).note_asked(look.asked[model])
        self._needs.want([*demand, *look.asked])
        self._keepers.look()
        self._inventory.read_devices(self._keepers.locked_bytes)
        self._sleepers.tend()
        pids = supervisor.pids
        self._readings.keep(pids.values())
        for name, resident in list(self._inventory.residents.items()):
            if resident.status == "draining":
                if name not in pids:
                    del self._inventory.residents[name]
                    self._sleepers.add(resident)
                continue
            beat = look.beats.get(resident.worker.worker_id)
            if beat is not None and resident.status == "loading":
                resident.status, resident.since, resident.load_s = "ready", now, max(0.0, now - resident.since)
                self._inventory.past_of(resident.model).note_loaded()
                self._keepers.end(resident.model, "it is loaded")
            elif resident.status == "ready" and not resident.is_stable and now - resident.since > STABLE_S:
                resident.is_stable = True
                self._inventory.past_of(resident.model).note_stable()
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
        past = self._inventory.past_of(resident.model)
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

    def _report(self, supervisor: Supervisor, now: float) -> MachineReport:
        return self._reports.machine(now, self._boot, self._fence, self._done, is_leaving=supervisor.is_stopping)

    def _give_up(self, resident: Resident, pause_s: float) -> None:
        """Have no worker in this place, as its model has failed."""
        model = resident.model
        resident.status = "draining"
        failure = self._inventory.past_of(model).failure
        why = failure.why.whole if failure is not None else ""
        self._console.say(f"paddock: {model} did not load ({why}); it is tried again in {pause_s:.0f} s")

    def _follow(self, orders: MachineOrders | None, supervisor: Supervisor, now: float) -> None:
        """Carry out what is ordered, unless it is of a planner that another one has taken the place of, or was meant
        for an earlier start of this supervisor."""
        if orders is None or orders.fence < self._fence or orders.boot != self._boot:
            return
        if orders.fence > self._fence:
            self._fence, self._done = orders.fence, 0
        self._reports.note_waits(orders.at, orders.waits)
        for model in orders.forgotten:
            self._keepers.end(model, "an admin has unloaded it")
        for start in orders.starts:
            if start.number > self._done:
                if self._sleepers.makes_room(start):
                    break  # it is told again
                self._done = start.number
                self._start(start, supervisor, now)
        for resident in self._inventory.residents.values():
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
        for resident in self._inventory.residents.values():
            model = resident.model
            if resident.status != "draining" and model not in self._inventory.models:
                self._dismiss(resident.worker.name, Why.of("the catalog does not have ", (model,), " any more"), now)
        self._tell_reserved(supervisor, now)
        wanted = tuple(each.worker for each in self._inventory.residents.values() if each.status != "draining")
        if {worker.name for worker in wanted} != {worker.name for worker in supervisor.wanted}:
            supervisor.want(wanted)

    def _start(self, start: StartOrder, supervisor: Supervisor, now: float) -> None:
        """Start a worker, or refuse to: what the planner knew can be a second old."""
        if why := self._hindrance(start):
            self._inventory.past_of(start.model).refusal = Failure(start.model, now + REFUSED_PAUSE_S, Why.of(why))
            self._console.say(f"paddock: {start.model} is not loaded: {why}")
            return
        taken = {*supervisor.pids, *(each.worker.name for each in self._inventory.residents.values())}
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
        self._inventory.residents[worker.name] = Resident(
            start.worker, worker, start.shares, now, replaces=start.replaces, watch=watch
        )
        self._console.say(f"paddock: {start.model} is loaded: {start.why.whole}")

    def _hindrance(self, start: StartOrder) -> str:
        """Return why a worker can't be started now; empty: it can."""
        if start.model not in self._inventory.models or start.model not in self._needs.found:
            return "the catalog of this machine does not have it any more"
        if not self._needs.holds(start.model):
            return "its file has changed, and its memory is predicted anew"
        for share in start.shares:
            free = self._inventory.free_of(share.device)
            if free is None:
                return f"this machine has no {share.device}"
            if share.bytes > free:
                return f"it takes {gib(share.bytes)} of {share.device}, and {gib(max(0, free))} are free by now"
        return ""

    def _dismiss(self, name: str, why: Why, now: float) -> None:
        resident = self._inventory.residents[name]
        model = resident.model
        resident.status = "draining"
        if all(each.model != model or each.status == "draining" for each in self._inventory.residents.values()):
            self._inventory.past_of(model).left_at = now
        self._console.say(f"paddock: {name} of {model} leaves: {why.whole}")

    def _reserve(self, resident: Resident, why: Why, now: float, *, is_reserved: bool) -> None:
        resident.status, resident.told_at = "reserved" if is_reserved else "ready", NEVER
        resident.settles_at = math.inf if is_reserved and not resident.is_told_reserved else now + SETTLE_S
        calls = "no more calls" if is_reserved else "calls again"
        self._console.say(f"paddock: {resident.worker.name} of {resident.model} gets {calls}: {why.whole}")

    def _tell_reserved(self, supervisor: Supervisor, now: float) -> None:
        """Tell workers whether they are reserved, until their heartbeats say so."""
        for resident in self._inventory.residents.values():
            is_reserved = resident.status == "reserved"
            is_due = resident.is_told_reserved != is_reserved and now - resident.told_at > TOLD_AGAIN_S
            if is_due and resident.status in ("ready", "reserved"):
                resident.told_at = now
                supervisor.reserve(resident.worker.name, is_reserved)


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
