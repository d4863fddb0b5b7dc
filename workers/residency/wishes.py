"""Finds which models want a worker, in the order in which they get one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workers.protocol.residency import Why
from workers.residency.picture import NEVER, Demand, Model
from workers.residency.plan import Wait
from workers.residency.scene import Scene, seconds

Cause = Literal["kept", "call", "growth", "replacement", "preload"]
"""Why a worker is wanted. `kept`: `min` asks for it, or its group is there; `call`: somebody waits for the model;
`growth`: calls wait too long for the workers that there are; `replacement`: one has other settings than the catalog;
`preload`: the catalog loads it at the start."""

_LAST: dict[Cause, int] = {"growth": 3, "replacement": 4, "preload": 5}
"""Causes for which nobody waits -> their place among all."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A worker that is wanted, of one model or of each model of a group that loads as one."""

    models: tuple[str, ...]
    """The model that is wanted first."""
    cause: Cause
    why: Why
    priority: int = 0
    since: float = NEVER
    served_at: float = NEVER
    """When its teams last had a model loaded (`Demand.served_at`)."""
    is_awaited: bool = True
    """Whether anybody waits for it, so that it becomes overdue."""
    is_overdue: bool = False
    """Whether busy workers may be reserved for it."""
    is_in_turn: bool = False
    """Whether its team was served longer ago than those whose wishes are overdue, so that it does not come after all of
    them."""
    replaces: str = ""
    """Id of the stale worker whose place it is to take."""

    @property
    def model(self) -> str:
        return self.models[0]

    @property
    def rank(self) -> tuple[int, float, float, float, str]:
        """Return what wishes are sorted by: teams take turns, and those of a team come in the order in which they began
        to wait. Overdue ones come first, whatever their priority, so that none waits for ever."""
        if self.cause == "kept":
            return (0, -self.priority, NEVER, NEVER, self.model)
        if self.cause == "call":
            place, priority = (1, NEVER) if self.is_overdue or self.is_in_turn else (2, -self.priority)
            return (place, priority, self.served_at, self.since, self.model)
        return (_LAST[self.cause], -self.priority, self.served_at, self.since, self.model)


def find_wishes(scene: Scene) -> list[Wish]:
    """Return what is wanted, sorted; models that can't be loaded now are told to wait."""
    by_unit: dict[tuple[str, ...], list[Wish]] = {}
    for model in scene.picture.models:
        if not model.policy.most:
            continue
        wishes = [
            *_kept(scene, model),
            *_called(scene, model),
            *_replaced(scene, model),
            *_preloaded(scene, model),
        ]
        if wishes and _may_load(scene, model, wishes[0]):
            # Models that load as one are wanted once, as the one of them that comes first.
            unit = scene.unit_of(model.name)
            known = by_unit.get(unit)
            by_unit[unit] = wishes if known is None else min(known, wishes, key=lambda each: each[0].rank)
    return sorted(_in_turn([wish for wishes in by_unit.values() for wish in wishes]), key=lambda wish: wish.rank)


def count_wanted(scene: Scene, wishes: Sequence[Wish]) -> dict[str, int]:
    """Return model -> the workers that it should have (`Plan.wanted`). Call it before any wish is granted."""
    wanted = {model: scene.count_usable(model) for model in scene.models}
    for wish in wishes:
        if wish.cause == "replacement" or (wish.cause in ("call", "preload") and wanted[wish.model]):
            continue  # What `min` keeps serves calls as well.
        wanted[wish.model] += 1
        for companion in wish.models[1:]:
            wanted[companion] = wanted[companion] or 1
    return wanted


def _in_turn(wishes: list[Wish]) -> list[Wish]:
    """Return the wishes with those marked that have their turn before overdue ones, of the same or a lower priority: a
    team that wants more models than fit has some that are overdue at all times."""
    overdue = [wish for wish in wishes if wish.cause == "call" and wish.is_overdue]
    if not overdue:
        return wishes

    def is_in_turn(wish: Wish) -> bool:
        later = [other.priority for other in overdue if other.served_at > wish.served_at]
        return bool(later) and wish.cause == "call" and wish.is_awaited and wish.priority >= max(later)

    return [replace(wish, is_in_turn=True) if is_in_turn(wish) else wish for wish in wishes]


def _kept(scene: Scene, model: Model) -> Iterator[Wish]:
    missing = model.policy.min - scene.num_usable(model.name)
    unit = scene.unit_of(model.name)
    why = Why.of((model.name,), f" is kept loaded (min: {model.policy.min})")
    for _ in range(missing):
        yield Wish(first_of(unit, model.name), "kept", why, model.policy.priority, is_overdue=True)
    if missing <= 0 and len(unit) > 1 and not scene.num_usable(model.name):
        companion = next((other for other in unit if scene.num_usable(other)), "")
        if companion:
            why = Why.of((model.name,), " loads together with ", (companion,))
            yield Wish(first_of(unit, model.name), "kept", why, model.policy.priority)


def _called(scene: Scene, model: Model) -> Iterator[Wish]:
    demand = scene.demand.get(model.name)
    if demand is None:
        return
    unit, priority, since = (
        first_of(scene.unit_of(model.name), model.name),
        model.policy.priority,
        scene.since_of(demand),
    )
    if not scene.num_usable(model.name):
        begins_at = demand.oldest_since + demand.waits_s
        if demand.waits_s and scene.now < begins_at and not scene.reserved(model.name):
            scene.wait(Wait(model.name, "turn", _left_before(model.name, demand), begins_at))
            return
        # Where nobody waits, no worker with calls gives way.
        is_overdue = demand.is_awaited and scene.now >= since + scene.bounds.patience_s
        yield Wish(unit, "call", _told(scene, demand), priority, since, demand.served_at, demand.is_awaited, is_overdue)
    elif _may_grow(scene, model, demand):
        wait, age = seconds(demand.predicted_wait_s), seconds(scene.now - demand.oldest_since)
        workers = f" wait {wait} for its {scene.num_usable(model.name)} workers, the oldest {age}"
        why = Why.of("calls of ", (model.name,), workers)
        yield Wish(unit, "growth", why, priority, since)


def _may_grow(scene: Scene, model: Model, demand: Demand) -> bool:
    workers = scene.usable(model.name)
    if len(workers) >= model.policy.most or any(worker.status == "loading" for worker in workers):
        return False
    if demand.predicted_wait_s < scene.bounds.grow_wait_s:
        return False
    scene.look_at(demand.oldest_since + scene.bounds.grow_age_s)
    return scene.now - demand.oldest_since >= scene.bounds.grow_age_s


def _replaced(scene: Scene, model: Model) -> Iterator[Wish]:
    """Yield a successor of one worker with outdated settings, unless one is being loaded or could not be."""
    usable = scene.usable(model.name) if scene.has_stale else []
    # Where the settings are those of its predecessor again, that one is released.
    back = {worker.id for worker in usable if not worker.is_stale} | {each.id for each in scene.reserved(model.name)}
    stale = [worker for worker in usable if worker.is_stale and worker.replaces not in back]
    if stale and not any(worker.status == "loading" for worker in usable) and not any(scene.failures_of(model.name)):
        first = min(stale, key=lambda worker: (worker.is_busy, worker.idle_since, worker.id))
        why = Why.of("the settings of ", (model.name,), " have changed")
        yield Wish((model.name,), "replacement", why, model.policy.priority, replaces=first.id)


def _preloaded(scene: Scene, model: Model) -> Iterator[Wish]:
    is_due = model.policy.preload and not model.was_loaded and model.name not in scene.demand
    if is_due and not scene.num_usable(model.name):
        unit = first_of(scene.unit_of(model.name), model.name)
        yield Wish(unit, "preload", Why.of((model.name,), " is preloaded"), model.policy.priority)


def _may_load(scene: Scene, model: Model, wish: Wish) -> bool:
    """Return whether a model may be loaded now; otherwise note that it waits."""
    name, demand = model.name, scene.demand.get(model.name)
    is_admins = demand is not None and demand.is_asked_by_admin
    failure = max(scene.failures_of(name), key=lambda failure: failure.not_before, default=None)
    if name in scene.picture.unloaded:
        if demand is not None:
            why = Why.of("an admin has unloaded ", (name,), "; POST /models/load loads it again")
            scene.wait(Wait(name, "unloaded", why))
        return False
    if wish.cause == "call" and not (model.policy.autoload or is_admins or model.asleep_on):
        scene.wait(Wait(name, "autoload", not_by_calls(name)))
        return False
    if failure is not None and not scene.candidates(model):
        wait = seconds(failure.not_before - scene.now)
        why = Why.of((name,), " failed to load (", *failure.why.parts, f"); it is tried again in {wait}")
        scene.wait(Wait(name, "failed", why, failure.not_before))
        return False
    return True


def not_by_calls(model: str) -> Why:
    """Return why a model whose `autoload` is off is not loaded."""
    return Why.of((model,), " is not loaded by calls (autoload: false); POST /models/load does")


def _told(scene: Scene, demand: Demand) -> Why:
    if demand.is_asked_by_admin and not demand.num_waiting:
        return Why.of("an admin loads ", (demand.model,))
    if not demand.num_waiting:
        calls = "1 call is" if demand.num_elsewhere == 1 else f"{demand.num_elsewhere} calls are"
        return Why.of(f"{calls} served by a fallback of ", (demand.model,))
    calls = "1 call waits" if demand.num_waiting == 1 else f"{demand.num_waiting} calls wait"
    age = seconds(max(0.0, scene.now - demand.oldest_since))
    return Why.of(f"{calls} for ", (demand.model,), f", the oldest for {age}")


def _left_before(model: str, demand: Demand) -> Why:
    wait = seconds(demand.waits_s)
    return Why.of(
        "callers have left loads that began for them, so ", (model,), f" is loaded for one who waits for {wait}"
    )


def first_of(unit: tuple[str, ...], model: str) -> tuple[str, ...]:
    """Return the models of a unit with this one first."""
    return (model, *(other for other in unit if other != model))
