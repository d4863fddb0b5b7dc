"""Merges what machines and gateways have told into one picture of the fleet. Pure.

Model files, memory and catalogs may differ between machines: a model can be loaded where its need was told. Where the
rules of catalogs differ (a model's policy, a group), the planner's own counts, then that of the first machine by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from workers.planner.messages import MachineCatalog, MachineReport, ToldModel, ToldWorker
from workers.protocol.residency import MAX_TEAMS, ModelDemand
from workers.residency.picture import NEVER, Demand, Failure, Machine, Model, Need, Picture, Worker
from workers.residency.policy import Group, Residency

NOBODY: Mapping[str, float] = MappingProxyType({})
AHEAD_S = 60.0
"""Seconds by which what a gateway tells may lie ahead of this machine's clock."""


@dataclass(frozen=True, slots=True)
class MachineView:
    """One machine as the planner sees it. Times are by the planner's clock."""

    report: MachineReport
    lag_s: float
    """Added to a time of the report, this gives the time by the planner's clock."""
    workers: tuple[Worker, ...]
    """With the orders that it was given."""
    catalog: MachineCatalog | None
    """None: it is not known yet, so that nothing is loaded there."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A model as all machines together describe it."""

    policy: Residency
    need: Need
    needs: Mapping[str, Need]
    machines: frozenset[str]


@dataclass(frozen=True, slots=True)
class Described:
    """The catalogs of all machines together."""

    models: Mapping[str, _Described] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    """All models, those of which no machine knows the need included."""


def worker_of(told: ToldWorker, machine: str, lag_s: float) -> Worker:
    """Return a worker of a report, with its times corrected."""
    last_used = told.last_used + lag_s if told.last_used else NEVER
    since = told.since + lag_s
    return Worker(
        *(told.id, told.model, machine, told.shares, told.status, since, last_used),
        num_running=told.num_running,
        num_granted=int(told.is_settling),
        num_taken=int(last_used > since),
        is_stale=told.is_stale,
        replaces=told.replaces,
        load_s=told.load_s,
        released_at=told.released_at + lag_s if told.released_at else NEVER,
    )


def describe(catalogs: Mapping[str, MachineCatalog], planner: str) -> Described:
    """Return the catalogs of all machines together; those of the planner's own machine count first."""
    told: dict[str, dict[str, ToldModel]] = {}
    groups: dict[str, Group] = {}
    for machine in sorted(catalogs, key=lambda name: (name != planner, name)):
        for model, one in catalogs[machine].models.items():
            told.setdefault(model, {})[machine] = one
        groups = {**catalogs[machine].groups, **groups}
    models = {model: found for model, each in told.items() if (found := _described(each)) is not None}
    return Described(models, groups, frozenset(told))


def _described(told: Mapping[str, ToldModel]) -> _Described | None:
    """Return a model as the machines describe it that know its need; None: none does."""
    needs = {machine: one.need for machine, one in told.items() if one.need is not None}
    if not needs:
        return None
    first = next(iter(needs.values()))
    policy = next(iter(told.values())).policy
    machines = frozenset(machine for machine in needs if not told[machine].is_outdated)
    return _Described(policy, first, {machine: need for machine, need in needs.items() if need != first}, machines)


def merge(
    machines: Mapping[str, MachineView],
    described: Described,
    demand: Mapping[str, ModelDemand],
    asked: Mapping[str, float],
    unloaded: frozenset[str],
    now: float,
    served: Mapping[str, float] = NOBODY,
    waits_s: Mapping[str, float] = NOBODY,
) -> Picture:
    """Return the picture that is decided from. `demand`: of all gateways together; `asked`: model -> when an admin
    asked for it; `served`: team -> when a model was last loaded for it; `waits_s`: team -> the seconds that one of its
    callers waits before a load begins."""
    return Picture(
        machines=tuple(_machine(name, view) for name, view in machines.items()),
        models=tuple(_models(machines, described)),
        workers=tuple(_workers(machines, described, demand, now)),
        demand=tuple(each for each in _demands(demand, asked, served, waits_s) if each.model in described.models),
        failures=tuple(_failures(machines, described, now)),
        unloaded=unloaded & described.models.keys(),
        groups=described.groups,
    )


def _machine(name: str, view: MachineView) -> Machine:
    most = view.catalog.models_max if view.catalog is not None else 0
    return Machine(name, view.report.devices, view.report.is_leaving, most)


def _models(machines: Mapping[str, MachineView], described: Described) -> Iterable[Model]:
    loaded: set[str] = set()
    left: dict[str, float] = {}
    asleep: dict[str, set[str]] = {}
    for machine, view in machines.items():
        loaded.update(view.report.loaded)
        for model in view.report.asleep:
            asleep.setdefault(model, set()).add(machine)
        for model, at in view.report.left.items():
            left[model] = max(left.get(model, NEVER), at + view.lag_s)
    for name, one in described.models.items():
        yield Model(
            *(name, one.policy, one.need, one.machines),
            was_loaded=name in loaded,
            left_at=left.get(name, NEVER),
            asleep_on=frozenset(asleep.get(name, ())),
            needs=one.needs,
        )


def _workers(
    machines: Mapping[str, MachineView], described: Described, demand: Mapping[str, ModelDemand], now: float
) -> Iterable[Worker]:
    known = described.models
    serving: dict[str, list[Worker]] = {}
    for view in machines.values():
        for worker in view.workers:
            if worker.model in demand and worker.status != "draining":
                serving.setdefault(worker.model, []).append(worker)
    # What gateways tell of a model's calls is true of the worker that was used last; the others may be idle for long.
    last = {
        model: max(each, key=lambda one: (one.num_running, one.last_used, one.id)) for model, each in serving.items()
    }
    for view in machines.values():
        for worker in view.workers:
            if worker is last.get(worker.model) and worker.model in known:
                yield _used(worker, demand[worker.model], len(serving[worker.model]), now)
            elif worker.model in known:
                yield worker


def _used(worker: Worker, demand: ModelDemand, num_serving: int, now: float) -> Worker:
    """Return the worker of a model that was used last, with what gateways tell of the model's calls."""
    # A heartbeat may not have a call yet that its gateway has placed; of several workers, any may have it.
    num_running = max(worker.num_running, demand.num_running) if num_serving == 1 else worker.num_running
    # A gateway whose clock was set back has noted a time that is still to come: its model would be in use till then.
    used_at = demand.used_at if 0.0 < demand.used_at <= now + AHEAD_S else NEVER
    last_used = max(worker.last_used, used_at, now if num_running else NEVER)
    num_taken = int(last_used > worker.since)
    return replace(worker, num_running=num_running, last_used=last_used, num_taken=num_taken)


def _failures(machines: Mapping[str, MachineView], described: Described, now: float) -> Iterable[Failure]:
    for name, view in machines.items():
        for model, failure in view.report.failures.items():
            not_before = failure.not_before + view.lag_s
            if model in described.models and not_before > now:
                yield Failure(model, not_before, failure.why, name)


def _demands(
    demand: Mapping[str, ModelDemand],
    asked: Mapping[str, float],
    served: Mapping[str, float],
    waits_s: Mapping[str, float],
) -> Iterable[Demand]:
    for model in sorted({*demand, *asked}):
        told, asked_at = demand.get(model, ModelDemand()), asked.get(model)
        since = min((at for at in (told.oldest_at, asked_at) if at), default=None)
        if since is not None:
            yield Demand(
                model,
                told.num_waiting,
                since,
                told.predicted_wait_s,
                is_asked_by_admin=asked_at is not None,
                num_elsewhere=told.num_elsewhere,
                teams=told.teams,
                served_at=min((served.get(team, NEVER) for team in told.teams), default=NEVER),
                waits_s=min((waits_s.get(team, 0.0) for team in told.teams), default=0.0) if asked_at is None else 0.0,
            )


def all_demand(told: Iterable[tuple[Mapping[str, ModelDemand], float]]) -> dict[str, ModelDemand]:
    """Return model -> its calls at all gateways together. `told`: what each gateway tells, and what its times are
    corrected by."""
    found: dict[str, ModelDemand] = {}
    for models, lag_s in told:
        for model, demand in models.items():
            one = _moved(demand, lag_s)
            known = found.get(model)
            found[model] = one if known is None else _sum(known, one)
    return found


def not_waiting(models: Mapping[str, ModelDemand]) -> dict[str, ModelDemand]:
    """Return what a gateway tells without its calls that wait, whose callers have gone."""
    return {
        model: ModelDemand(num_running=demand.num_running, used_at=demand.used_at) for model, demand in models.items()
    }


def _moved(demand: ModelDemand, lag_s: float) -> ModelDemand:
    return ModelDemand(
        num_waiting=demand.num_waiting,
        oldest_at=demand.oldest_at + lag_s if demand.oldest_at else 0.0,
        predicted_wait_s=demand.predicted_wait_s,
        num_running=demand.num_running,
        num_elsewhere=demand.num_elsewhere,
        used_at=demand.used_at + lag_s if demand.used_at else 0.0,
        teams=demand.teams,
    )


def _sum(one: ModelDemand, other: ModelDemand) -> ModelDemand:
    oldest = [each.oldest_at for each in (one, other) if each.oldest_at]
    return ModelDemand(
        num_waiting=one.num_waiting + other.num_waiting,
        oldest_at=min(oldest, default=0.0),
        predicted_wait_s=max(one.predicted_wait_s, other.predicted_wait_s),
        num_running=one.num_running + other.num_running,
        num_elsewhere=one.num_elsewhere + other.num_elsewhere,
        used_at=max(one.used_at, other.used_at),
        teams=tuple(dict.fromkeys((*one.teams, *other.teams)))[:MAX_TEAMS],
    )
