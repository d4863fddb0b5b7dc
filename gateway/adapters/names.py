"""Finds a model's LoRA adapters, the contents of each, and those that can be called by name. Pure.

The sources are the workers' records and the registered adapters. A name stands for one file's contents over the whole
fleet: a worker that has other contents under it does not have the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from workers.protocol.heartbeat import Heartbeat

Contents = Mapping[str, str]
"""Adapter -> SHA-256 of its file, in hex; empty where no worker has reported it."""

NOTHING: Contents = {}


def contents_of(workers: Iterable[Heartbeat], registered: Contents = NOTHING) -> dict[str, str]:
    """Return a model's adapters and their contents, sorted by name.

    Registered contents count first; of workers that contradict each other, the one that started last.
    """
    found: dict[str, str] = {}
    for beat in sorted(workers, key=_age):
        for name in beat.adapters:
            found[name] = beat.adapter_hashes.get(name, "")
    return dict(sorted({**found, **registered}.items()))


def agreed(workers: Iterable[Heartbeat], contents: Contents) -> tuple[Heartbeat, ...]:
    """Return the workers' records without those of their adapters whose contents are not the fleet's."""
    return tuple(_without(beat, [name for name in beat.adapters if _differs(beat, name, contents)]) for beat in workers)


def known_adapters(workers: Iterable[Heartbeat], registered: Contents = NOTHING) -> list[str]:
    """Return the names of one model's adapters. An adapter's index in the list is its number."""
    return list(contents_of(workers, registered))


def callable_adapters(models: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return adapter -> its model, for adapters that can be called as `model`: a name that two models have is left out.

    `models`: model -> names of its adapters.
    """
    owners: dict[str, set[str]] = {}
    for model, names in models.items():
        for name in names:
            owners.setdefault(name, set()).add(model)
    return {name: owner.pop() for name, owner in sorted(owners.items()) if len(owner) == 1}


def _age(beat: Heartbeat) -> tuple[float, str]:
    return beat.started_at, beat.boot


def _differs(beat: Heartbeat, name: str, contents: Contents) -> bool:
    own, wanted = beat.adapter_hashes.get(name, ""), contents.get(name, "")
    return bool(own and wanted and own != wanted)


def _without(beat: Heartbeat, names: list[str]) -> Heartbeat:
    if not names:
        return beat
    return replace(
        beat,
        adapters=tuple(name for name in beat.adapters if name not in names),
        adapters_resident=tuple(name for name in beat.adapters_resident if name not in names),
        adapter_hashes={name: sha256 for name, sha256 in beat.adapter_hashes.items() if name not in names},
    )
