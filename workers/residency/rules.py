"""Checks the rules of groups and of `models_max` for one machine, and finds who must leave so that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from workers.residency.eviction import Leaver
from workers.residency.scene import Scene


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that would not hold: of these models, so many must leave the machine."""

    models: frozenset[str]
    number: int


def broken_rules(scene: Scene, machine: str, models: Sequence[str], present: Set[str]) -> list[BrokenRule]:
    """Return the rules that would be broken if `models` were loaded beside those that are `present`."""
    if not scene.has_rules:
        return []
    # One that is there and leaves is loaded anew, after those that its place is promised to.
    leaving = {worker.model for worker in scene.on_machine[machine] if worker.id in scene.leaving}
    new = [model for model in models if model not in present or model in leaving]
    others = frozenset(present) - frozenset(models)
    found: list[BrokenRule] = []
    if not new:
        return found
    for model in new:
        group = scene.group_of(model)
        if group.at_once:
            name = scene.models[model].policy.group
            members = frozenset(other for other in others if scene.group_name(other) == name)
            wanted = sum(scene.group_name(other) == name for other in models)
            if (excess := len(members) + wanted - group.at_once) > 0:
                found.append(BrokenRule(members, excess))
        if scene.has_exclusive_groups and (
            excluded := frozenset(other for other in others if _exclude(scene, model, other))
        ):
            found.append(BrokenRule(excluded, len(excluded)))
    most = scene.models_max(machine)
    if most and (excess := len(others) + len(models) - most) > 0:
        found.append(BrokenRule(others, excess))
    return found


def _exclude(scene: Scene, model: str, other: str) -> bool:
    """Return whether two models may not be on one machine, since the group of one of them is exclusive."""
    if scene.group_name(model) == scene.group_name(other):
        return False
    first, second = scene.models.get(model), scene.models.get(other)
    if first is None or second is None or first.policy.stays or second.policy.stays:
        return False
    return scene.group_of(model).exclusive or scene.group_of(other).exclusive


def clear_rules(
    scene: Scene, machine: str, models: Sequence[str], ranked: Sequence[Leaver]
) -> tuple[Leaver, ...] | None:
    """Return who of the `ranked` must leave a machine so that `models` may be there; None: not enough of them may."""
    chosen: list[Leaver] = []
    for _ in range(len(ranked) + 1):
        gone = {worker.id for leaver in chosen for worker in leaver.workers} | scene.counted
        broken = broken_rules(scene, machine, models, scene.present(machine, without=gone))
        if not broken:
            return tuple(chosen)
        leaving = _whole_model(scene, machine, broken[0].models, gone, ranked)
        if not leaving:
            return None
        chosen += leaving
    return None


def _whole_model(
    scene: Scene, machine: str, models: Iterable[str], gone: Set[str], ranked: Sequence[Leaver]
) -> list[Leaver]:
    """Return the leavers with which the first of these models leaves a machine wholly; empty: none can."""
    wanted = frozenset(models)
    for first in ranked:
        for model in sorted(first.models & wanted):
            own = [leaver for leaver in ranked if model in leaver.models]
            covered = {worker.id for leaver in own for worker in leaver.workers} | gone
            there = [worker.id for worker in scene.on_machine[machine] if worker.model == model]
            if model not in scene.started_on[machine] and covered.issuperset(there):
                return [leaver for leaver in own if any(worker.id not in gone for worker in leaver.workers)]
    return []
