"""Keeps the orders to one machine until its reports show that they were heard. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from workers.planner.messages import MachineOrders, MachineReport, StartOrder, ToldWait
from workers.protocol.residency import Why
from workers.residency.picture import Status, Worker
from workers.residency.plan import Action, Drain, Release, Reserve, Start, Stop


@dataclass(slots=True)
class Orders:
    """The orders of one planner to one machine that its reports do not show yet."""

    boot: str
    """The start of the machine's supervisor that they are for."""
    starts: list[StartOrder] = field(default_factory=list)
    started_at: dict[str, float] = field(default_factory=dict)
    """Worker -> when it was ordered."""
    leaving: dict[str, Why] = field(default_factory=dict)
    sleeping: set[str] = field(default_factory=set)
    """Those of `leaving` whose models' weights stay in memory."""
    reserved: dict[str, Why] = field(default_factory=dict)
    released: dict[str, Why] = field(default_factory=dict)

    def settle(self, report: MachineReport, fence: int) -> None:
        """Forget the orders that a report shows to have been heard. `fence`: the planner's number."""
        if report.boot != self.boot:
            # The machine's supervisor was started anew, and has none of these workers.
            self.boot = report.boot
            self.starts.clear()
            self._forget_workers()
        elif report.fence == fence:
            self.starts = [start for start in self.starts if start.number > report.done]
        self.started_at = {start.worker: self.started_at[start.worker] for start in self.starts}
        status = {worker.id: worker.status for worker in report.workers}
        self.leaving = {
            worker: why for worker, why in self.leaving.items() if status.get(worker, "draining") != "draining"
        }
        self.sleeping &= self.leaving.keys()
        self.reserved = {worker: why for worker, why in self.reserved.items() if status.get(worker) == "ready"}
        self.released = {worker: why for worker, why in self.released.items() if status.get(worker) == "reserved"}

    def add(self, action: Action, number: int, worker: str, now: float) -> None:
        """Add what a plan says of one of the machine's workers. `worker`: the id that one to be started gets."""
        match action:
            case Start():
                self.starts.append(
                    StartOrder(
                        number=number,
                        worker=worker,
                        model=action.model,
                        shares=action.shares,
                        why=action.why,
                        replaces=action.replaces,
                    )
                )
                self.started_at[worker] = now
            case Stop() | Drain():
                self._forget(action.worker)
                self.leaving[action.worker] = action.why
                if isinstance(action, Stop) and action.sleeps:
                    self.sleeping.add(action.worker)
            case Reserve():
                self._forget(action.worker)
                self.reserved[action.worker] = action.why
            case Release():
                self._forget(action.worker)
                self.released[action.worker] = action.why
            case _:
                pass

    def overlay(self, workers: Iterable[Worker], machine: str) -> tuple[Worker, ...]:
        """Return a machine's workers as they will be when the orders are carried out: the next decision counts with
        that."""
        found = [self._changed(worker) for worker in workers]
        for start in self.starts:
            since = self.started_at[start.worker]
            found.append(
                Worker(start.worker, start.model, machine, start.shares, "loading", since, replaces=start.replaces)
            )
        return tuple(found)

    def message(
        self, now: float, fence: int, planner: str, waits: Mapping[str, ToldWait], forgotten: Iterable[str] = ()
    ) -> MachineOrders:
        """Return the orders as they are told to the machine. `forgotten`: models whose weights it keeps no more."""
        return MachineOrders(
            at=now,
            fence=fence,
            planner=planner,
            boot=self.boot,
            starts=tuple(self.starts),
            leaving=dict(self.leaving),
            sleeping=tuple(sorted(self.sleeping)),
            forgotten=tuple(forgotten),
            reserved=dict(self.reserved),
            released=dict(self.released),
            waits=dict(waits),
        )

    @property
    def is_empty(self) -> bool:
        return not (self.starts or self.leaving or self.reserved or self.released)

    def _changed(self, worker: Worker) -> Worker:
        status: Status | None = None
        if worker.id in self.leaving:
            status = "draining"
        elif worker.id in self.reserved:
            return replace(worker, status="reserved", num_granted=1)  # a call may be on its way to it
        elif worker.id in self.released:
            status = "ready"
        return worker if status is None else replace(worker, status=status)

    def _forget(self, worker: str) -> None:
        for orders in (self.leaving, self.reserved, self.released):
            orders.pop(worker, None)
        self.sleeping.discard(worker)

    def _forget_workers(self) -> None:
        for orders in (self.leaving, self.reserved, self.released):
            orders.clear()
        self.sleeping.clear()
