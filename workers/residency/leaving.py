"""Finds the workers that leave for reasons of their own, whether or not another model waits for their place."""

from __future__ import annotations

from collections.abc import Iterable

from workers.protocol.residency import Why
from workers.residency.picture import Worker
from workers.residency.plan import Drain, Reserve, Stop
from workers.residency.scene import Scene, seconds


def leave_by_rule(scene: Scene) -> None:
    """Let those workers leave that an admin, the catalog or a machine does not want, and those past their ttl."""
    for worker in scene.workers:
        why = _unwanted(scene, worker)
        if why and worker.status != "draining":
            dismiss(scene, worker, why)
    for model in scene.models.values() if scene.has_stale else ():
        _replaced(scene, model.name)
    for worker in scene.workers:
        if worker.status == "reserved" and worker.is_busy and not worker.is_stale and worker.id not in scene.leaving:
            _serve_again(scene, worker)
    for model in scene.models.values():
        _above_max(scene, model.name)
    for model in scene.models.values():
        _past_ttl(scene, model.name)


def dismiss(scene: Scene, worker: Worker, why: Why, wanted_by: str = "", *, sleeps: bool = False) -> None:
    """Stop a worker that has no calls, drain one that has some."""
    if not worker.is_busy:
        scene.actions.append(Stop(worker.id, worker.model, worker.shares, why, wanted_by, sleeps))
    else:
        scene.actions.append(Drain(worker.id, worker.model, why))
    scene.leave(worker)


def retire(scene: Scene, worker: Worker, why: Why) -> None:
    """Give a worker no more calls, and stop it once it has none. Its calls are not cut off, however long they take, nor
    one that was about to be given to it."""
    if worker.status == "ready":
        scene.actions.append(Reserve(worker.id, worker.model, worker.model, why))
        scene.leave(worker)
    elif worker.is_busy:
        scene.leave(worker)
    else:
        dismiss(scene, worker, why)


def _unwanted(scene: Scene, worker: Worker) -> Why:
    """Return why a worker must leave; empty: nothing says so."""
    model = scene.models.get(worker.model)
    if model is None or not model.policy.most:
        return Why.of("the catalog does not have ", (worker.model,), " any more")
    if worker.model in scene.picture.unloaded:
        return Why.of("an admin has unloaded ", (worker.model,))
    if scene.machines[worker.machine].is_leaving:
        return Why.of(f"machine {worker.machine} is being emptied")
    return Why()


def _replaced(scene: Scene, name: str) -> None:
    """Let a model's workers with outdated settings leave: those that load, those whose successors are there, and those
    that had to make room for theirs, unless that takes their calls so long that others wait in vain."""
    stale = [worker for worker in scene.usable(name) if worker.is_stale] + [
        worker for worker in scene.reserved(name) if worker.is_stale
    ]
    if not stale:
        return
    ready = [worker for worker in scene.usable(name) if worker.status == "ready"]
    succeeded = {worker.replaces for worker in ready}
    fresh = {worker.id for worker in ready if not worker.is_stale}
    for worker in stale:
        if worker.status == "loading":
            dismiss(scene, worker, Why.of("the settings of ", (name,), " have changed while it was loaded"))
        elif worker.id in succeeded:
            retire(scene, worker, Why.of("a worker with the new settings of ", (name,), " takes its place"))
        elif worker.replaces in fresh:
            retire(scene, worker, Why.of("the settings of ", (name,), f" are those of {worker.replaces} again"))
        elif worker.status == "reserved" and worker.is_busy and not fresh and scene.has_waited_long(name):
            why = Why.of("its calls take long, and others wait for ", (name,), "; it is replaced later")
            scene.release(worker, why)
        elif worker.status == "reserved":
            retire(scene, worker, Why.of("the settings of ", (name,), " have changed"))


def _serve_again(scene: Scene, worker: Worker) -> None:
    """Release a reserved worker whose calls take so long that others wait in vain: else one caller with a long answer
    and another one with a call for another model would keep a model from everybody."""
    if not scene.num_usable(worker.model) and scene.has_waited_long(worker.model):
        why = Why.of("its calls take long, and others wait for ", (worker.model,))
        scene.release(worker, why)


def _above_max(scene: Scene, name: str) -> None:
    most = scene.models[name].policy.most
    extra = scene.count_usable(name) - most
    if extra <= 0:
        return
    ranked = sorted(
        scene.usable(name), key=lambda worker: (not worker.is_stale, worker.is_busy, worker.idle_since, worker.id)
    )
    for worker in ranked[:extra]:
        dismiss(scene, worker, Why.of((name,), f" may have at most {most} workers"))


def _past_ttl(scene: Scene, name: str) -> None:
    """Stop a model's workers beyond `min` that have had no call for its `ttl_s`, those idle longest first."""
    policy = scene.models[name].policy
    if not policy.ttl_s or policy.pinned:
        return
    spare = scene.count_usable(name) - policy.min
    for worker in sorted(scene.usable(name), key=lambda worker: (worker.idle_since, worker.id))[: max(0, spare)]:
        unit = unit_workers(scene, worker)
        if any(not _is_past_ttl(scene, each) for each in unit):
            continue
        for each in unit:
            if each.id not in scene.leaving:
                idle = seconds(scene.now - each.idle_since)
                why = Why.of((each.model,), f" has had no call for {idle}")
                dismiss(scene, each, why, sleeps=may_sleep(scene, each))


def may_sleep(scene: Scene, worker: Worker) -> bool:
    """Return whether the catalog lets a worker's model sleep once that has left: no other worker of it stays, and the
    files in memory would be those that it loads again."""
    model = scene.models.get(worker.model)
    if model is None or model.policy.idle != "sleep" or worker.is_stale or worker.status == "loading":
        return False
    return all(other.id == worker.id for other in scene.usable(worker.model))


def _is_past_ttl(scene: Scene, worker: Worker) -> bool:
    ttl_s = scene.models[worker.model].policy.ttl_s
    if worker.status != "ready" or not ttl_s or not scene.is_idle(worker):
        return False
    scene.look_at(worker.idle_since + ttl_s)
    return scene.now >= worker.idle_since + ttl_s


def unit_workers(scene: Scene, worker: Worker) -> tuple[Worker, ...]:
    """Return the workers that leave with this one: those of its group on its machine, if members go `together`."""
    unit = scene.unit_of(worker.model)
    if len(unit) == 1:
        return (worker,)
    return tuple(_live(other for other in scene.on_machine[worker.machine] if other.model in unit))


def _live(workers: Iterable[Worker]) -> Iterable[Worker]:
    return (worker for worker in workers if worker.status != "draining")
