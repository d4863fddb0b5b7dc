"""A picture with its indices, and what has been decided of it so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

from workers.protocol.residency import Why
from workers.residency.ledger import Ledger
from workers.residency.picture import Demand, Failure, Machine, Model, Picture, Worker
from workers.residency.plan import Action, Plan, Release, Start, Wait
from workers.residency.policy import Group

NO_GROUP = Group()


class Scene:
    """One decision in the making. Actions are noted here, with what follows from them for the rest of the decision."""

    def __init__(self, picture: Picture, now: float) -> None:
        self.picture = picture
        self.now = now
        self.bounds = picture.bounds
        self.machines = {machine.id: machine for machine in picture.machines}
        self.models = {model.name: model for model in picture.models}
        self.workers = sorted(
            (worker for worker in picture.workers if worker.machine in self.machines), key=lambda worker: worker.id
        )
        """Workers of machines that are there."""
        self.has_stale = any(worker.is_stale for worker in self.workers)
        self.demand = {demand.model: demand for demand in picture.demand}
        self.ledger = Ledger(picture.machines, self.workers)
        self.of_model: dict[str, list[Worker]] = {}
        self.on_machine: dict[str, list[Worker]] = {machine: [] for machine in self.machines}
        for worker in self.workers:
            self.of_model.setdefault(worker.model, []).append(worker)
            self.on_machine[worker.machine].append(worker)
        self.leaving: set[str] = set()
        """Ids of the workers that leave: they drained already, or are stopped or reserved by this plan."""
        self.counted: set[str] = set()
        """Ids of those of them whose bytes are in the ledger as coming. Those that have calls are counted for the model
        that waits for them, since that can take long."""
        self.released: set[str] = set()
        """Ids of reserved workers that this plan gives calls again."""
        self.num_started: dict[str, int] = {}
        """Model -> workers that this plan starts."""
        self.started_on: dict[str, list[str]] = {machine: [] for machine in self.machines}
        """Machine -> models that this plan starts there, or promises a place."""
        self.asleep_bytes: dict[str, int] = {}
        """Machine -> weights of models that this plan lets sleep there."""
        self.promised: set[str] = set()
        """Models that memory which is being freed is kept for."""
        self.actions: list[Action] = []
        self.moments: list[float] = []
        """When to decide again though nothing happens."""
        self.has_rules = bool(
            picture.groups or picture.models_max or any(machine.models_max for machine in picture.machines)
        )
        self.has_exclusive_groups = any(group.exclusive for group in picture.groups.values())
        self._num_usable: dict[str, int] = {}
        self._waiting: set[str] = set()
        self._members: dict[str, tuple[str, ...]] = {
            name: tuple(model.name for model in picture.models if model.policy.group == name) for name in picture.groups
        }
        self._failures: dict[str, list[Failure]] = {}
        for failure in picture.failures:
            self._failures.setdefault(failure.model, []).append(failure)
        for worker in self.workers:
            if worker.status == "draining":
                self.leave(worker)

    def models_max(self, machine: str) -> int:
        """Return the most models that may be on a machine at once; 0: any number."""
        own = self.machines[machine].models_max
        return self.picture.models_max if own is None else own

    def group_of(self, model: str) -> Group:
        found = self.models.get(model)
        name = found.policy.group if found else None
        return self.picture.groups.get(name, NO_GROUP) if name else NO_GROUP

    def group_name(self, model: str) -> str:
        found = self.models.get(model)
        return (found.policy.group if found else None) or ""

    def unit_of(self, model: str) -> tuple[str, ...]:
        """Return the models that load and leave with a model, itself included."""
        found = self.models.get(model)
        if found is not None and found.policy.group and self.group_of(model).together:
            return self._members[found.policy.group]
        return (model,)

    def usable(self, model: str) -> list[Worker]:
        """Return a model's workers that take calls, or will once they are loaded."""
        return [
            worker
            for worker in self.of_model.get(model, ())
            if worker.id not in self.leaving and (worker.status in ("loading", "ready") or worker.id in self.released)
        ]

    def present(self, machine: str, without: Set[str] = frozenset()) -> set[str]:
        """Return the models that are on a machine until those `without` are gone, and those that are to come there."""
        workers = self.on_machine[machine]
        return {worker.model for worker in workers if worker.id not in without} | set(self.started_on[machine])

    def count_usable(self, model: str) -> int:
        """Return the number of these workers. One that is replaced and its successor count as one."""
        found = self._num_usable.get(model)
        if found is None:
            usable = self.usable(model)
            found = len(usable)
            if self.has_stale:
                ids = {worker.id for worker in usable}
                found -= sum(worker.replaces in ids for worker in usable)
            self._num_usable[model] = found
        return found

    def num_usable(self, model: str) -> int:
        """Return the number of a model's usable workers, with those that this plan starts."""
        return self.count_usable(model) + self.num_started.get(model, 0)

    def is_idle(self, worker: Worker) -> bool:
        """Return whether a worker has no calls, and none that wait are about to be given to it."""
        return not worker.is_busy and (worker.status != "ready" or worker.model not in self.demand)

    def since_of(self, demand: Demand) -> float:
        """Return since when a model waits for its turn."""
        model = self.models[demand.model]
        # A reserved worker still serves the model, so that its turn has not ended yet.
        is_served = any(
            worker.status == "reserved" and not worker.is_stale for worker in self.of_model.get(demand.model, ())
        )
        return self.now if is_served else max(demand.oldest_since, model.left_at)

    def has_waited_long(self, model: str) -> bool:
        """Return whether a call has waited for a model for `patience_s`."""
        demand = self.demand.get(model)
        if demand is None:
            return False
        self.look_at(demand.oldest_since + self.bounds.patience_s)
        return self.now - demand.oldest_since >= self.bounds.patience_s

    def failures_of(self, model: str) -> Iterable[Failure]:
        """Return the failures that keep a model from being loaded now."""
        return [failure for failure in self._failures.get(model, ()) if failure.not_before > self.now]

    def candidates(self, model: Model) -> list[Machine]:
        """Return the machines that a model may be loaded on."""
        failed = {failure.machine for failure in self.failures_of(model.name)}
        if "" in failed:
            return []
        return [
            machine
            for machine in self.picture.machines
            if not machine.is_leaving
            and machine.id not in failed
            and (model.machines is None or machine.id in model.machines)
        ]

    def leave(self, worker: Worker) -> None:
        """Note that a worker leaves."""
        self.leaving.add(worker.id)
        self._num_usable.pop(worker.model, None)
        if not worker.is_busy:
            self.count(worker)

    def count(self, worker: Worker) -> None:
        """Note that a leaving worker's bytes are coming."""
        if worker.id not in self.counted:
            self.counted.add(worker.id)
            self.ledger.leave(worker)

    def release(self, worker: Worker, why: Why | None = None) -> None:
        """Note that a reserved worker gets calls again. `why`: unless nobody wants its place any more."""
        self.released.add(worker.id)
        self._num_usable.pop(worker.model, None)
        why = why or Why.of("nobody waits for the place of ", (worker.model,), " any more")
        self.actions.append(Release(worker.id, worker.model, why))

    def reserved(self, model: str) -> list[Worker]:
        """Return a model's reserved workers that nobody has claimed yet in this plan."""
        return [
            worker
            for worker in self.of_model.get(model, ())
            if worker.status == "reserved" and worker.id not in self.leaving | self.released
        ]

    def start(self, action: Start) -> None:
        self.actions.append(action)
        self.ledger.take(action.machine, action.shares)
        self.num_started[action.model] = self.num_started.get(action.model, 0) + 1
        self.started_on[action.machine].append(action.model)

    def wait(self, action: Wait) -> None:
        """Note that a model waits, and when to decide again. Only what is told first about a model is kept."""
        if action.until is not None:
            self.look_at(action.until)
        if action.model not in self._waiting:
            self._waiting.add(action.model)
            self.actions.append(action)

    def is_waiting(self, model: str) -> bool:
        """Return whether this plan has a model wait."""
        return model in self._waiting

    def look_at(self, moment: float) -> None:
        """Note a moment at which to decide again, if it is still to come."""
        if self.now < moment < math.inf:
            self.moments.append(moment)

    def plan(self, wanted: Mapping[str, int], closed: Iterable[Wait]) -> Plan:
        return Plan(tuple(self.actions), min(self.moments, default=None), wanted, tuple(closed))


def seconds(duration: float) -> str:
    return f"{duration:,.0f} s" if duration >= 10 or duration == int(duration) else f"{duration:.1f} s"


def gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def names(models: Iterable[str]) -> tuple[str, ...]:
    """Return the models' names as a part of a `Why`."""
    return tuple(sorted(set(models)))
