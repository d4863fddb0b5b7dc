"""Chooses the model for a call that names none: the catalog's default, else the only one that can do the job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from gateway.catalog.kinds import KIND_OF
from workers.models.catalog import Defaults, Job
from workers.protocol.heartbeat import Heartbeat

Workers = Mapping[str, Iterable[Heartbeat]]
"""Model -> its workers; models without any may be left out."""


def default_of(defaults: Defaults, job: Job) -> str:
    """Return the catalog's default name for a job; empty: it has none."""
    return {
        "chat": defaults.chat,
        "embed": defaults.embed,
        "rerank": defaults.rerank,
        "infill": defaults.infill,
    }[job] or ""


def able(job: Job, models: Iterable[str], workers: Workers) -> frozenset[str]:
    """Return the models that may do a job. One without workers counts: what it does is not known."""
    return frozenset(model for model in models if _may(job, tuple(workers.get(model, ()))))


def only(models: Set[str], workers: Workers) -> str:
    """Return the only one of these models, or of several the only one that has workers; empty: there is none."""
    served = models if len(models) == 1 else {model for model in models if any(True for _ in workers.get(model, ()))}
    return next(iter(served)) if len(served) == 1 else ""


def _may(job: Job, beats: tuple[Heartbeat, ...]) -> bool:
    kind = KIND_OF[job]
    return not beats or any(beat.kind == kind and (job != "infill" or beat.infill) for beat in beats)
