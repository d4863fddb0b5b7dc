"""The catalog's words about a model's residency: when its workers load and leave, which models exclude others.

The docstrings of the structs here are texts of docs/catalog.schema.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workers.protocol.requests import Name

MAX_WORKERS = 256
"""Most workers of one model, as for the catalog's `workers`."""

STAY_S, STAY_LOADS = 10.0, 3.0
"""Seconds, and times that loading took, for which a model stays once it is loaded: the less of both. A fourth at most
of the time goes to loading then, and where that takes a moment only, models change as often as calls want it."""


class Residency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a model's workers are loaded, and when they leave."""

    min: Annotated[int, Meta(ge=0, le=MAX_WORKERS, description="fewest workers, also while nobody calls")] = 0
    max: Annotated[int, Meta(ge=1, le=MAX_WORKERS, description="most workers; unset: the model's `workers`")] | None = (
        None
    )
    ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="seconds without a call after which workers beyond `min` leave; 0: they leave only when their "
            "memory is wanted",
        ),
    ] = 0.0
    idle: Annotated[
        Literal["unload", "sleep"],
        Meta(
            description="what becomes of the model after `ttl_s`, or when another one takes its place. `sleep`: its "
            "last worker leaves, and its weights stay in main memory until that is needed"
        ),
    ] = "unload"
    priority: Annotated[int, Meta(ge=-100, le=100, description="models of a higher one load first and leave last")] = 0
    group: Annotated[Name, Meta(description="one of the catalog's `groups`")] | None = None
    pinned: Annotated[bool, Meta(description="once loaded it stays, whoever wants its memory")] = False
    preload: Annotated[bool, Meta(description="load it at the start, if there is memory for it")] = False
    autoload: Annotated[bool, Meta(description="whether a call loads it; otherwise only POST /models/load does")] = True
    min_resident_s: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(
            description="seconds after loading in which it does not leave for another model; left out: 10, or three "
            "times what loading took, if that is less"
        ),
    ] = None

    def stay_s(self, load_s: float) -> float:
        """Return the seconds after loading in which a worker does not leave for another model. `load_s`: what loading
        it took; 0: not known."""
        if self.min_resident_s is not None:
            return self.min_resident_s
        return min(STAY_S, STAY_LOADS * load_s) if load_s else STAY_S

    def quiet_s(self, load_s: float) -> float:
        """Return the most seconds after its last call for which it is worth waiting for the next: `min_resident_s`, or
        else what loading took. `load_s`: that; 0: not known."""
        if self.min_resident_s is not None:
            return self.min_resident_s
        return load_s or math.inf

    @property
    def most(self) -> int:
        """Return the most workers; call it on what `resolve` returns."""
        return self.max or 0

    @property
    def stays(self) -> bool:
        """Return whether a worker is kept whatever others want: the model is pinned, or `min` asks for one."""
        return self.pinned or self.min > 0


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Models that exclude each other or others on a machine, or that load and leave as one."""

    at_once: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="most members that are loaded on a machine at once, as llama-swap's `swap` for 1; 0: any "
            "number",
        ),
    ] = 0
    exclusive: Annotated[
        bool,
        Meta(
            description="while a member is loaded on a machine, no model outside of the group is, but those that are "
            "pinned or that `min` keeps"
        ),
    ] = False
    together: Annotated[bool, Meta(description="members load and leave as one, on one machine")] = False


def resolve(residency: Residency | None, workers: int) -> Residency:
    """Return a model's residency with `max` filled in. Without one, all of its `workers` are there from the start."""
    if residency is None:
        return Residency(min=workers, max=workers)
    return msgspec.structs.replace(residency, max=residency.max or workers)


def own_faults(residency: Residency, workers: int) -> Iterator[str]:
    """Yield what contradicts itself in one model's residency and its number of `workers`."""
    if not workers:
        yield "`workers` is 0, so the model has none here; remove `residency`, or `workers`"
    elif residency.max is not None and workers not in (1, residency.max):
        yield f"`workers` is {workers} and `residency.max` {residency.max}; remove `workers`, `max` says it"
    most = residency.max or workers
    if residency.min > most:
        yield f"`residency.min` is {residency.min} and at most {most} may run; lower `min`, or raise `residency.max`"
    if residency.preload and residency.min:
        yield "`residency.preload` has no use beside a `min`, whose workers load at the start; remove one of the two"
    if residency.idle == "sleep" and residency.min:
        yield "`residency.idle` is sleep, and `min` keeps a worker loaded; remove one of the two"
    if residency.pinned and residency.ttl_s:
        yield "`residency.pinned` keeps the model, `ttl_s` lets it leave; remove one of the two"


def shared_faults(
    policies: Mapping[str, Residency], groups: Mapping[str, Group], models_max: int
) -> Iterator[tuple[str, str]]:
    """Yield what models and groups contradict in each other, as the place in the catalog and what is wrong there.

    `policies`: model -> its residency, resolved. While one names a group that there is not, groups are not judged."""
    members: dict[str, dict[str, Residency]] = {name: {} for name in groups}
    for model, policy in policies.items():
        if policy.group is not None:
            members.setdefault(policy.group, {})[model] = policy
    for name, group in groups.items() if members.keys() == groups.keys() else ():
        yield from ((f"groups.{name}", fault) for fault in _group_faults(group, members[name]))
    staying = [model for model, policy in policies.items() if policy.stays]
    if models_max and len(staying) > models_max:
        yield (
            "models_max",
            f"it is {models_max}, and {len(staying)} models stay loaded ({', '.join(sorted(staying))}); raise it, or "
            "give some of them `residency: {min: 0}`",
        )


def _group_faults(group: Group, members: Mapping[str, Residency]) -> Iterator[str]:
    if not members:
        yield "no model names this group as its `residency.group`; name it there, or remove it"
        return
    if not (group.at_once or group.exclusive or group.together):
        yield "it changes nothing; set `at_once`, `exclusive` or `together`, or remove it"
    if group.together and 0 < group.at_once < len(members):
        yield f"`together` loads {len(members)} members, and `at_once` allows {group.at_once}; remove one of the two"
    if group.together and len({(each.min, each.max, each.pinned, each.autoload) for each in members.values()}) > 1:
        yield "members that load `together` need the same `min`, `max`, `pinned` and `autoload`; make them equal"
    staying = sorted(model for model, policy in members.items() if policy.stays)
    if group.at_once and len(staying) > group.at_once:
        yield f"`at_once` is {group.at_once}, and {', '.join(staying)} stay loaded; raise it, or lower their `min`"
    elif group.at_once and len(staying) == group.at_once < len(members):
        never = min(members.keys() - set(staying))
        yield (
            f"`at_once` is {group.at_once}, and {', '.join(staying)} stay loaded, so that {never} never would be; "
            "raise it, or take some model out of the group"
        )
    if group.exclusive and staying:
        yield (
            f"it is exclusive and {staying[0]} stays loaded, so that no model outside of it ever would be; lower "
            f"`residency.min` of {staying[0]}, or unpin it"
        )
