"""Finds a model's LoRA adapters, their files' hashes, and those that a request may name as its `model`. Does no I/O.

The sources are the workers' heartbeats and the registered adapters. A name stands for the same file in the whole fleet:
a worker with another file of this name does not have the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from workers.protocol.heartbeat import Heartbeat

Contents = Mapping[str, str]
"""Adapter -> SHA-256 of its file, in hex; an empty string if no worker has reported the hash."""

NOTHING: Contents = {}


def contents_of(workers: Iterable[Heartbeat], registered: Contents = NOTHING) -> dict[str, str]:
    """Return adapter -> SHA-256 of its file, for all adapters of one model, sorted by name.

    The hash is the registered one. If none is registered, it is that of the worker that was started last."""
    found: dict[str, str] = {}
    for beat in sorted(workers, key=_age):
        for name in beat.adapters:
            found[name] = beat.adapter_hashes.get(name, "")
    return dict(sorted({**found, **registered}.items()))


def agreed(workers: Iterable[Heartbeat], contents: Contents) -> tuple[Heartbeat, ...]:
    """Return the heartbeats, each without the adapters whose hash differs from that in `contents`."""
    return tuple(_without(beat, [name for name in beat.adapters if _differs(beat, name, contents)]) for beat in workers)


def known_adapters(workers: Iterable[Heartbeat], registered: Contents = NOTHING) -> list[str]:
    """Return the names of a model's adapters, sorted. An adapter's index in the list is its number in the API."""
    return list(contents_of(workers, registered))


def callable_adapters(models: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return adapter -> its model, for the adapters that a request may name as `model`: those that only one model has.

    `models`: model -> names of its adapters."""
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
