"""Names of LoRA adapters, from what the workers say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from workers.protocol.heartbeat import Heartbeat


def known_adapters(workers: Iterable[Heartbeat]) -> list[str]:
    """Those of one model that some worker has. An adapter's place in the list is its number."""
    return sorted({name for worker in workers for name in worker.adapters})


def callable_adapters(workers: Mapping[str, Iterable[Heartbeat]]) -> dict[str, str]:
    """Adapter -> its model, for adapters that can be called as `model`: a name that two models have is none."""
    owners: dict[str, set[str]] = {}
    for model, beats in workers.items():
        for name in known_adapters(beats):
            owners.setdefault(name, set()).add(model)
    return {name: models.pop() for name, models in sorted(owners.items()) if len(models) == 1}
