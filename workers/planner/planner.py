"""Plans for all machines while its machine holds the lease: hears, merges, decides, and keeps orders until they are
heard. Does no I/O; a fleet of one machine is planned by the same code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.planner.given_up import GivenUp
from workers.planner.hearing import UNSURE_S, Hearing
from workers.planner.merge import Described, MachineView, describe, merge, worker_of
from workers.planner.messages import (
    MachineCatalog,
    MachineOrders,
    MachineReport,
    ToldWait,
    decode_report,
)
from workers.planner.orders import Orders
from workers.protocol.residency import ModelDemand
from workers.residency.decide import decide
from workers.residency.picture import Picture, Worker
from workers.residency.plan import Plan, Start, Wait

MAX_SERVED = 4096
"""Maximum number of teams whose last turn is remembered."""
ASKED_LIFE_S = 600.0
"""Seconds for which an admin's wish to load a model is remembered."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, and the orders that follow from it."""

    picture: Picture
    plan: Plan
    orders: Mapping[str, MachineOrders]
    """Machine -> its orders, for each machine that is there."""


@dataclass(slots=True)
class Planner:
    """The planner of one machine; of use while that holds the lease."""

    machine: str
    fence: int = 0
    unloaded: frozenset[str] = frozenset()
    """Models that an admin has unloaded."""
    asked: Mapping[str, float] = field(default_factory=dict)
    """Model -> when an admin asked for it to be loaded, as far as that counts."""
    gone: tuple[str, ...] = ()
    """Machines that have vanished since the last decision, whose orders are void."""
    _machines: Hearing[MachineReport] = field(default_factory=lambda: Hearing(decode_report))
    _catalogs: dict[str, tuple[str, MachineCatalog]] = field(default_factory=dict)
    """Machine -> its catalog, and the digest that the machine tells of it."""
    _workers: dict[str, tuple[float, float, tuple[Worker, ...]]] = field(default_factory=dict)
    """Machine -> when its last report was read, what its times are corrected by, its workers."""
    _orders: dict[str, Orders] = field(default_factory=dict)
    _served: dict[str, float] = field(default_factory=dict)
    """Team -> when a model was last loaded for it; those that were served last are at the end."""
    _given_up: GivenUp = field(default_factory=GivenUp)
    _number: int = 0
    _waits_until: float = 0.0
    """Monotonic time until which others may not have told all yet."""
    _described: tuple[frozenset[tuple[str, str]], Described] = (frozenset(), Described())
    _own: MachineReport | None = None

    def begin(self, fence: int, clock: float, *, is_new_redis: bool) -> None:
        """Plan as the holder of a new lease: forget what was known of others, which may be old."""
        self.fence, self._number = fence, 0
        self._orders, self._workers = {}, {}
        self._machines = Hearing(decode_report)
        self._waits_until = clock + UNSURE_S if is_new_redis else 0.0

    def hear(
        self,
        own: MachineReport,
        reports: Mapping[bytes, bytes],
        asked: Mapping[str, float],
        now: float,
        clock: float,
    ) -> None:
        """Take in the report of this planner's own machine, what all have told, and what admins have asked for."""
        self._own = own
        self._machines.take(
            {name: value for name, value in reports.items() if name != self.machine.encode()}, now, clock
        )
        self.asked = {model: at for model, at in asked.items() if abs(now - at) < ASKED_LIFE_S}

    def unknown_catalogs(self, clock: float) -> list[str]:
        """Return the machines whose catalogs are to be read."""
        told = {name: heard.told.catalog for name, heard in self._machines.live(clock).items()}
        return [name for name, digest in told.items() if digest and self._digest(name) != digest]

    def learn(self, machine: str, digest: str, catalog: MachineCatalog) -> None:
        """Take in the catalog of a machine."""
        self._catalogs[machine] = (digest, catalog)

    def highest_fence(self, clock: float) -> int:
        """Return the highest number of a planner that any machine has heard of."""
        return max((heard.told.fence for heard in self._machines.live(clock).values()), default=0)

    def forgotten(self, clock: float) -> list[str]:
        """Return the machines whose fields in Redis may be removed, since they vanished long ago."""
        return [*self._machines.forgotten(clock)]

    def describe(self) -> Described:
        """Return the catalogs of all machines together. They change seldom."""
        key = frozenset((name, digest) for name, (digest, _) in self._catalogs.items())
        if key != self._described[0]:
            catalogs = {name: catalog for name, (_, catalog) in self._catalogs.items()}
            self._described = (key, describe(catalogs, self.machine))
        return self._described[1]

    def answered(self) -> list[str]:
        """Return the models that an admin asked for and that are loaded."""
        loaded = {worker.model for _, _, workers in self._workers.values() for worker in workers if _is_ready(worker)}
        return sorted(loaded & self.asked.keys())

    def decide(self, demand: Mapping[str, ModelDemand], now: float, clock: float) -> Decision | None:
        """Return what is to be done now; None: others may be there that have not told anything yet."""
        if self._own is None or clock < self._waits_until or self._machines.is_unsure(clock):
            return None
        views = self._views(self._own, clock)
        described = self.describe()
        waits_s = self._given_up.waits_s(now)
        picture = merge(views, described, demand, self.asked, self.unloaded, now, self._served, waits_s)
        plan = decide(picture, now)
        self._note_served(plan, demand, now)
        self._given_up.note(picture, plan, demand, now)
        self._order(plan, picture, now)
        told = (*plan.waits(), *plan.closed)
        waits = {wait.model: ToldWait(reason=wait.reason, why=wait.why) for wait in told}
        return Decision(picture, plan, {name: self._message(name, view, waits, now) for name, view in views.items()})

    def _note_served(self, plan: Plan, demand: Mapping[str, ModelDemand], now: float) -> None:
        """Note for which teams models are loaded."""
        for start in plan.starts():
            told = demand.get(start.model)
            for team in told.teams if told is not None else ():
                self._served.pop(team, None)
                self._served[team] = now
        while len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]

    def _views(self, own: MachineReport, clock: float) -> dict[str, MachineView]:
        """Return the machines that are there, by name."""
        reports: dict[str, tuple[MachineReport, float, float]] = {self.machine: (own, 0.0, clock)}
        for name, heard in self._machines.live(clock).items():
            reports[name] = (heard.told, heard.lag_s, heard.heard_at)
        self.gone = tuple(name for name in self._orders if name not in reports)
        self._orders = {name: orders for name, orders in self._orders.items() if name in reports}
        self._workers = {name: known for name, known in self._workers.items() if name in reports}
        self._catalogs = {name: known for name, known in self._catalogs.items() if name in reports}
        return {name: self._view(name, *reports[name]) for name in sorted(reports)}

    def _view(self, name: str, report: MachineReport, lag_s: float, heard_at: float) -> MachineView:
        known = self._workers.get(name)
        if known is None or known[:2] != (heard_at, lag_s):
            workers = tuple(worker_of(told, name, lag_s) for told in report.workers)
            self._workers[name] = known = (heard_at, lag_s, workers)
        orders = self._orders.setdefault(name, Orders(report.boot))
        if not orders.is_empty or orders.boot != report.boot:
            orders.settle(report, self.fence)
        workers = known[2] if orders.is_empty else orders.overlay(known[2], name)
        _, catalog = self._catalogs.get(name, ("", None))
        return MachineView(report, lag_s, workers, catalog)

    def _order(self, plan: Plan, picture: Picture, now: float) -> None:
        if plan.is_idle:
            return
        places = {worker.id: worker.machine for worker in picture.workers}
        for action in plan.actions:
            if isinstance(action, Wait):
                continue
            self._number += 1
            machine = action.machine if isinstance(action, Start) else places[action.worker]
            self._orders[machine].add(action, self._number, f"{machine}/{self.fence}.{self._number}", now)

    def _message(self, name: str, view: MachineView, waits: Mapping[str, ToldWait], now: float) -> MachineOrders:
        if waits and view.catalog is not None:
            waits = {model: wait for model, wait in waits.items() if model in view.catalog.models}
        forgotten = [model for model in view.report.asleep if model in self.unloaded]
        return self._orders[name].message(now, self.fence, self.machine, waits, forgotten)

    def _digest(self, machine: str) -> str:
        return self._catalogs[machine][0] if machine in self._catalogs else ""


def _is_ready(worker: Worker) -> bool:
    return worker.status in ("ready", "reserved")
